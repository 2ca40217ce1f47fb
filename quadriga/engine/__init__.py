"""The training engine: packed micro-batches, sharding, optimiser, and what happens when a step goes wrong."""

from __future__ import annotations

from quadriga.engine.engine import BatchCounts, TrainingEngine

__all__ = ["BatchCounts", "TrainingEngine"]
