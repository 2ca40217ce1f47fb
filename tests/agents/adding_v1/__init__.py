"""An environment as a user of verifiers writes it: sums, a tool that adds, and a reward for the right sum."""

from adding_v1.taskset import AddingTaskset

__all__ = ["AddingTaskset"]
