"""The native engine: the training module itself, with paged attention and continuous batching."""
