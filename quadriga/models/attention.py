"""Attention over packed sequences that never lets two of them see each other.

Registered with transformers under the name `quadriga_packed`; the model is called with `layout=SequenceLayout`, which
transformers hands through to here. transformers makes no mask for a name it does not know, so nothing of size
`[tokens, tokens]` ever exists.

- CUDA, 16-bit: `kernels.attention`, one kernel for the whole stream, sliding windows and capped scores included.
- Otherwise: scaled_dot_product_attention, one call for each run of neighbours of equal length. Micro-batches are sorted
  by length, so the runs are long where it matters.
- Otherwise with attention-logit softcapping (Gemma 2): plain matrix products for one segment at a time.

A response that shares its prompt with others (`packing.py`) sees that prompt's keys and values before its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadriga.errors import WorkerError
from quadriga.models.layout import Run, SequenceLayout

PACKED_ATTENTION = "quadriga_packed"
"""Name of this attention in transformers."""

MAX_KERNEL_HEAD = 256
"""Largest head that `kernels.attention` computes."""
_UNSUPPORTED = ("s_aux", "position_bias")
"""Arguments of attention variants (sinks, learned biases) that this module does not compute."""


def register_packed_attention() -> str:
    """Make `PACKED_ATTENTION` known to transformers; returns the name."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    return PACKED_ATTENTION


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    layout: SequenceLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each segment of `layout`, and to its prefix.

    Args:
        query: `[1, heads, T, D]`; key and value `[1, kv_heads, T, D]`, kv_heads dividing heads.
        sliding_window: a token sees this many, itself included.

    Returns:
        `[1, T, heads, D]`, and None where transformers expects attention weights.
    """
    if layout is None or attention_mask is not None or not getattr(module, "is_causal", True):
        raise WorkerError(
            f"{type(module).__name__} called {PACKED_ATTENTION} without a layout, with a mask, or not causally",
            "call the model with layout=SequenceLayout and attention_mask=None",
        )
    if named := [name for name in _UNSUPPORTED if kwargs.get(name) is not None]:
        raise WorkerError(
            f"{type(module).__name__} wants attention with {', '.join(named)}, which Quadriga does not compute",
            "choose a model without it",
        )
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    if layout.parallel is not None:
        q, k, v = (layout.parallel.by_heads(x) for x in (q, k, v))
    if sliding_window is not None and layout.max_context <= sliding_window:
        sliding_window = None
    if dropout == 0 and takes_kernels(q):
        out = _by_kernels(q, k, v, layout, scaling, sliding_window, softcap)
    elif softcap is not None:
        out = _softcapped(q, k, v, layout, scaling, sliding_window, softcap, dropout)
    else:
        out = _by_runs(q, k, v, layout, scaling, sliding_window, dropout)
    if layout.parallel is not None:
        out = layout.parallel.by_tokens(out)
    return out.unsqueeze(0), None


def _by_runs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    scaling: float | None,
    window: int | None,
    dropout: float,
) -> Tensor:
    """One call of SDPA for each run of segments of equal shape."""
    sizes = [run.count * run.length for run in layout.runs]
    outputs = []
    for run, *parts in zip(layout.runs, q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
        qs, ks, vs = (part.unflatten(0, (run.count, run.length)) for part in parts)
        if run.prefix_length:
            ks, vs = _after_prefix(k, ks, run), _after_prefix(v, vs, run)
        masked = run.prefix_length > 0 or (window is not None and run.length > window)
        attended = F.scaled_dot_product_attention(
            qs.transpose(1, 2),
            ks.transpose(1, 2),
            vs.transpose(1, 2),
            attn_mask=layout.mask(run.length, run.prefix_length, window, q.dtype) if masked else None,
            dropout_p=dropout,
            is_causal=not masked,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _after_prefix(stream: Tensor, own: Tensor, run: Run) -> Tensor:
    """`own[count, length, ...]` with the prefix of each before it: `[count, prefix_length + length, ...]`."""
    start, blocks = run.blocks
    prefixes = stream[start : start + blocks * run.prefix_length].unflatten(0, (blocks, run.prefix_length))
    if blocks == 1:
        chosen = prefixes.expand(run.count, *prefixes.shape[1:])
    else:
        chosen = prefixes.index_select(0, torch.tensor(run.block_of, device=stream.device))
    return torch.cat([chosen, own], dim=1)


def _softcapped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    scaling: float | None,
    window: int | None,
    softcap: float,
    dropout: float,
) -> Tensor:
    group = q.shape[1] // k.shape[1]
    scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
    keys, values = k.split(layout.lengths), v.split(layout.lengths)
    outputs = []
    for i, qs in enumerate(q.split(layout.lengths)):
        before = layout.prefixes[i]
        ks, vs = (torch.cat([x[before], x[i]]) if before >= 0 else x[i] for x in (keys, values))
        ks, vs = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (ks, vs))
        scores = softcap * torch.tanh(qs.transpose(0, 1) @ ks.transpose(1, 2) * (scaling / softcap))
        scores = scores.float() + layout.mask(qs.shape[0], ks.shape[1] - qs.shape[0], window, torch.float32)
        weights = scores.softmax(-1).to(q.dtype)
        outputs.append((F.dropout(weights, dropout) @ vs).transpose(0, 1))
    return torch.cat(outputs)


# ---- CUDA ------------------------------------------------------------------------------------------------------------


def takes_kernels(q: Tensor) -> bool:
    """Whether attention with these queries is computed by `kernels.attention`."""
    return q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= MAX_KERNEL_HEAD


def shares_prompts(config: Any) -> bool:
    """Whether a model with this Hugging Face config can share prompts on CUDA, computing in 16 bit."""
    config = config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size <= MAX_KERNEL_HEAD and not getattr(config, "attention_dropout", 0)


def _by_kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    from quadriga.models.kernels.attention import Segments, segment_attention
    from quadriga.models.kernels.gather import gather_rows, readers_of

    # All layers share what is made here.
    if "segments" not in layout.kept:
        layout.kept["segments"] = Segments.of(layout.lengths, layout.contexts, q.device)
    if layout.shares:
        # The kernel wants the keys of a segment in one run, so a prompt's are copied for each of its responses: keys and values
        # of attention alone, while projections and MLPs, most of the work, see the prompt once.
        if "readers" not in layout.kept:
            layout.kept["readers"] = readers_of(layout.context_tokens, k.shape[0])
        k, v = (gather_rows(x, layout.context_tokens, layout.kept["readers"]) for x in (k, v))
    scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
    return segment_attention(q, k, v, layout.kept["segments"], scaling, window, softcap)
