"""Supervised fine-tuning, on the engine and the datasets that reinforcement learning uses."""
