"""What the routers of a mixture of experts do with a micro-batch: how even their load is, and the loss that evens it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class RouterWatch:
    """Sees the choices of all routers of a model, while it is asked to.

    transformers' routers are modules of their own that give logits, weights and chosen experts of each token.
    """

    def __init__(self, model: nn.Module) -> None:
        self.routers = [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]
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

    def _see(self, module: nn.Module, arguments: Any, told: Any) -> None:
        if self._seen is not None and isinstance(told, tuple) and len(told) == 3:
            self._seen.append((told[0], told[2]))

    def balance(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The auxiliary loss of the watched pass, with gradient, and figures of it.

        The loss is experts · Σ_e (part of the tokens that chose e) · (mean probability of e), the mean over layers: the number
        of experts a token has if all are chosen alike, more if not.
        """
        losses, figures = [], []
        for logits, chosen in self._last:
            experts = logits.shape[-1]
            probabilities = logits.float().softmax(-1)
            load = torch.zeros(experts, device=logits.device)
            load.index_add_(0, chosen.flatten(), torch.ones(chosen.numel(), device=logits.device))
            load /= max(1, logits.shape[0])
            losses.append(experts * (load * probabilities.mean(0)).sum())
            own = probabilities.detach()
            entropy = -(own * own.clamp_min(1e-9).log()).sum(-1).mean()
            uneven = load.max() * experts / load.sum().clamp_min(1e-9)
            figures.append(torch.stack([entropy, (load == 0).float().mean(), uneven]))
        loss, table = torch.stack(losses).mean(), torch.stack(figures)
        means = table.mean(0)
        return loss, {"router_entropy": means[0], "router_idle": means[1], "router_load_max": table[:, 2].max()}
