"""PPO and its family."""
