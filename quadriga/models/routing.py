"""What the routers of a mixture of experts do with a micro-batch: how even their load is, and the loss that evens it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quadriga.models.sequence_parallel import SequenceParallel


def routers_of(model: nn.Module) -> list[nn.Module]:
    """The routers of `model`, in the order of its layers.

    transformers' routers are modules of their own that give logits, weights and chosen experts of each token.
    """
    return [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]


class RouterWatch:
    """Sees the choices of all routers of a model, while it is asked to."""

    def __init__(self, model: nn.Module) -> None:
        self.routers = routers_of(model)
        self._seen: list[tuple[Tensor, Tensor]] | None = None
        for router in self.routers:
            router.register_forward_hook(self._see)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around a forward pass; what recomputes it later is not seen."""
        self._seen, self._last = [], []
        try:
            yield
        finally:
            self._last, self._seen = self._seen, None

    def _see(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._seen is not None and isinstance(output, tuple) and len(output) == 3:
            self._seen.append((output[0], output[2]))

    def balance(self, tokens: int, shared_with: SequenceParallel | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """The auxiliary loss of the watched pass, with gradient, and figures of it.

        The loss is experts · Σ_e (part of the tokens that chose e) · (mean probability of e), the mean over layers: the number
        of experts a token has if all are chosen alike, more if not.

        Args:
            tokens: so many tokens of the pass are of rows; what follows fills up the stream.
            shared_with: the ranks that have the other parts of the stream. The values are those of the whole stream on every
                rank; the gradient is that of the own tokens, and those of all ranks add up.
        """
        own = [_sums(logits[:tokens], chosen[:tokens]) for logits, chosen in self._last]
        whole = torch.cat([sums.detach() for sums in own])
        if shared_with is not None:
            whole = shared_with.add_up(whole)
        losses, figures = [], []
        for mine, everyones in zip(own, whole.split([len(sums) for sums in own]), strict=True):
            experts = (len(mine) - 2) // 2
            all_tokens = everyones[-1].clamp_min(1)
            load, mean = everyones[:experts] / all_tokens, everyones[experts:-2] / all_tokens
            mine = mine[experts:-2] / all_tokens
            losses.append(experts * (load * (mean + (mine - mine.detach()))).sum())
            uneven = load.max() * experts / load.sum().clamp_min(1e-9)
            figures.append(torch.stack([everyones[-2] / all_tokens, (load == 0).float().mean(), uneven]))
        loss, table = torch.stack(losses).mean(), torch.stack(figures)
        means = table.mean(0)
        return loss, {"router_entropy": means[0], "router_idle": means[1], "router_load_max": table[:, 2].max()}


def _sums(logits: Tensor, chosen: Tensor) -> Tensor:
    """Over the tokens of `logits[T, experts]`: choices of each expert, probability of each (with gradient), entropy, tokens."""
    probabilities = logits.float().softmax(-1)
    choices = torch.zeros(logits.shape[-1], device=logits.device)
    choices.index_add_(0, chosen.flatten(), torch.ones(chosen.numel(), device=logits.device))
    known = probabilities.detach()
    entropy = -(known * known.clamp_min(1e-9).log()).sum()
    count = torch.tensor(float(len(logits)), device=logits.device)
    return torch.cat([choices, probabilities.sum(0), torch.stack([entropy, count])])
