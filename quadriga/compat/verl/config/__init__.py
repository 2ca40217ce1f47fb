"""What Hydra finds in `pkg://verl.trainer.config`."""
