"""Judging a model: a dataset, a scorer, and figures that say how sure they are."""
