"""A trunk with one number per token on top: the critic's value, or the reward model's score."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from quadriga.models.exact import is_exact
from quadriga.models.packing import PackedRows
from quadriga.models.token_model import TokenModel, select_rows


class ScalarModel(TokenModel):
    """trunk → scalar head.

    Args:
        trunk: the base model of a Hugging Face causal LM or classifier.
        head: Linear(hidden, 1).
    """

    def __init__(self, trunk: Any, head: nn.Linear) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head

    @property
    def huggingface(self) -> Any:
        return self.trunk

    @property
    def trunk_module(self) -> nn.Module:
        return self.trunk

    def forward(self, packed: PackedRows, at_last_token: bool = False) -> dict[str, Tensor]:
        """`values`, float32: `[N]`, each from the state before its response token was chosen (a value function knows
        the prefix, not the action); or, `at_last_token`, `[sequences]`, from the whole sequence (a score)."""
        hidden = self.last_hidden_state(packed)
        chosen = select_rows(hidden, packed.last_tokens if at_last_token else packed.predictors)
        bias = None if self.head.bias is None else self.head.bias.float()
        if chosen.is_cuda and is_exact():
            from quadriga.models.kernels.linear import linear

            values = linear(chosen.float(), self.head.weight.float(), bias)
        else:
            values = F.linear(chosen.float(), self.head.weight.float(), bias)
        return {"values": values.squeeze(-1)}


def new_scalar_head(hidden_size: int) -> nn.Linear:
    """A head that says 0 everywhere.

    The first advantages are then those of a policy without a baseline, instead of noise, and the head's own gradient
    does not vanish at 0: it is the trunk's that does, for one step.
    """
    head = nn.Linear(hidden_size, 1, bias=False)
    nn.init.zeros_(head.weight)
    return head
