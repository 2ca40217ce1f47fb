"""Hugging Face models as Quadriga uses them: loaded, packed without padding, log-probs in chunks."""
