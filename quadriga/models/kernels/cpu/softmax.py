"""What a chunk of float32 logits on a CPU is needed for, each in one pass over it: its statistics, and its gradient.

The functions of `quadriga.models.kernels.softmax`, for models without a softcap.
"""

from __future__ import annotations

from torch import Tensor

from quadriga.models.kernels.cpu.library import kernels
from quadriga.models.kernels.cpu.operations import pointers


def statistics(
    raw: Tensor,
    targets: Tensor,
    scale: float,
    softcap: None,
    normaliser: Tensor,
    target_logit: Tensor,
    entropy: Tensor,
) -> None:
    """Fill the `[R]` outputs with logsumexp(z), z of the target, and the entropy of softmax(z); z = `raw[R, V]` · scale."""
    outputs = pointers(normaliser, target_logit, entropy)
    kernels().softmax_statistics(*pointers(raw, targets.contiguous()), scale, *raw.shape, *outputs)


def gradient(
    raw: Tensor,
    targets: Tensor,
    scale: float,
    softcap: None,
    normaliser: Tensor,
    entropy: Tensor,
    grad_log_prob: Tensor,
    grad_entropy: Tensor | None,
    out: Tensor,
) -> Tensor:
    """The gradient of the loss by `raw`, in the place of `raw`; `out` is not used."""
    by_log_prob = grad_log_prob.contiguous()
    by_entropy = None if grad_entropy is None else grad_entropy.contiguous()
    statistics_of = pointers(normaliser, entropy, by_log_prob)
    kernels().softmax_gradient(
        *pointers(raw, targets.contiguous()),
        scale,
        *statistics_of,
        None if by_entropy is None else by_entropy.data_ptr(),
        *raw.shape,
    )
    return raw
