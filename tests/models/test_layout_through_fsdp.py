"""What all layers of a model share about a packed stream is computed once, also when FSDP hands it on."""

from __future__ import annotations

import torch
from torch.distributed.utils import _apply_to_tensors

from quadriga.models.layout import SequenceLayout


def test_fsdp_hands_on_the_very_layout_that_it_was_given():
    layout = SequenceLayout.of([3, 2, 4], [-1, 0, 0])
    arguments = {"hidden": torch.zeros(2), "layout": layout}
    assert _apply_to_tensors(lambda tensor: tensor.bfloat16(), arguments)["layout"] is layout


def test_contexts_are_each_prefix_and_then_its_segment():
    layout = SequenceLayout.of([3, 2, 4, 1, 2], [-1, -1, 0, 1, 0])
    expected = [0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7, 8, 3, 4, 9, 0, 1, 2, 10, 11]
    assert layout.context_tokens.tolist() == expected
    assert layout.contexts == (3, 2, 7, 3, 5)
