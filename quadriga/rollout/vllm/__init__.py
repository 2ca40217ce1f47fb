"""vLLM behind the contract of `RolloutEngine`: its engine in a process of its own beside the slot, which lives and ends with it."""
