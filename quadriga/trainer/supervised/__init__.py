"""Supervised training (fine-tuning, reward models, DPO) on the engine and the datasets of reinforcement learning."""
