"""Norms, rotary embedding and gated MLPs as single kernels, in place of Hugging Face's modules.

Only modules of known classes are replaced, by modules that hold the very same parameters under the same names and compute
the same function with less memory traffic: by Triton's kernels on CUDA, by those of `kernels/cpu` in float32 on a CPU.
Everything else runs as transformers wrote it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadriga.models.exact import is_exact
from quadriga.models.kernels.cpu import operations as cpu
from quadriga.models.kernels.cpu.library import kernels
from quadriga.models.kernels.cpu.linear import FusedLinear, prefers_onednn

_ALIKE = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose attention, norm and MLP are written alike in transformers."""
_GEMMAS = ("gemma", "gemma2", "gemma3")
"""Those with norms of weight + 1 and MLPs with GELU; fused on CUDA only."""


def fuse(module: nn.Module, device: torch.device) -> int:
    """Replace what can be in `module`, in place, where `device` has kernels; returns how many modules were.

    Call it before the weights are sharded.
    """
    on_cpu = device.type == "cpu" and all(p.dtype == torch.float32 for p in module.parameters())
    if device.type != "cuda" and not (on_cpu and kernels() is not None):
        return 0
    replaced = 0
    for parent in reversed(list(module.modules())):  # the innermost first: what is replaced takes its children along
        for name, child in list(parent.named_children()):
            if is_altered(child):
                continue
            if (fused := _fused(child, on_cpu) or _linear(child, on_cpu)) is not None:
                setattr(parent, name, fused.train(child.training))
                replaced += 1
    return replaced


def is_altered(module: nn.Module) -> bool:
    """Whether somebody has changed how this one module computes: hooks, or a `forward` of its own."""
    return bool("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)


def _linear(module: nn.Module, on_cpu: bool) -> nn.Module | None:
    if type(module) is not nn.Linear:
        return None
    if on_cpu:
        return FusedLinear(module) if prefers_onednn() else None
    return ExactLinear(module) if is_exact() else None


def _fused(module: nn.Module, on_cpu: bool) -> nn.Module | None:
    origin, name = type(module).__module__.split("."), type(module).__name__
    if origin[:2] != ["transformers", "models"] or origin[2] not in (_ALIKE if on_cpu else (*_ALIKE, *_GEMMAS)):
        return None
    is_gemma = origin[2] in _GEMMAS
    if name.endswith("RMSNorm"):
        return GemmaRMSNorm(module) if is_gemma else FusedRMSNorm(module)
    if name.endswith("MLP") and type(module.act_fn).__name__ in (_GELU if is_gemma else _SILU):
        return FusedMLP(module)
    rotates_all = getattr(getattr(module, "config", None), "partial_rotary_factor", 1.0) in (None, 1.0)
    if name.endswith("Attention") and rotates_all and getattr(module, "is_causal", True):
        return FusedAttention(module)
    return None


_SILU, _GELU = ("SiLU", "SiLUActivation"), ("GELUTanh", "PytorchGELUTanh")
"""Names of the activations in PyTorch and transformers."""


class FusedRMSNorm(nn.Module):
    """x / rms(x) · weight, in float32 and rounded once."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self.variance_epsilon = norm.variance_epsilon

    def forward(self, hidden_states: Tensor) -> Tensor:
        if cpu.fits(hidden_states, self.weight):
            return cpu.RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)
        return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


class GemmaRMSNorm(nn.Module):
    """x / rms(x) · (weight + 1), in float32 and rounded once. On CUDA."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        from quadriga.models.kernels.norm import rms_norm

        return rms_norm(hidden_states, self.weight, self.eps, 1.0)


class ExactLinear(nn.Module):
    """x · Wᵀ + b, with the same bits for a row in any batch; see `kernels.linear`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        from quadriga.models.kernels.linear import linear

        return linear(x, self.weight, self.bias)


class FusedMLP(nn.Module):
    """down(act(gate(x)) · up(x)); act is SiLU, or GELU on CUDA."""

    merged: Any = None
    """Computes in its place where it only generates, see `quadriga.rollout.native.cuda.merged`."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.is_gelu = type(mlp.act_fn).__name__ in _GELU

    def forward(self, x: Tensor) -> Tensor:
        if self.merged is not None:
            return self.merged(x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        if cpu.fits(gate, up):
            return self.down_proj(cpu.Swiglu.apply(gate, up))
        if not gate.is_cuda:
            return self.down_proj(F.silu(gate) * up)
        from quadriga.models.kernels.gated import geglu, swiglu

        return self.down_proj((geglu if self.is_gelu else swiglu)(gate, up))


class FusedAttention(nn.Module):
    """Projections, rotary embedding, and the attention that the config names. Without transformers' own cache."""

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module
    plain: nn.Module
    merged: Any = None
    """Gives queries, keys and values where it only generates, see `quadriga.rollout.native.cuda.merged`."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        for name, child in attention.named_children():
            setattr(self, name, child)
        self.config, self.layer_idx, self.head_dim = attention.config, attention.layer_idx, attention.head_dim
        self.num_key_value_groups, self.scaling = attention.num_key_value_groups, attention.scaling
        self.attention_dropout, self.is_causal = attention.attention_dropout, True
        # Mistral reads it from the config, Llama has none.
        source = self.config if "mistral" in type(attention).__module__ else attention
        self.sliding_window = getattr(source, "sliding_window", None)
        # Gemma 2 caps its scores; Gemma 3 has the key and does not.
        caps = "gemma2" in type(attention).__module__
        self.capped = {"softcap": attention.attn_logit_softcapping} if caps else {}
        # What it was made of, for attentions that expect one of transformers' own. Not a submodule: the children are shared.
        self.__dict__["plain"] = attention

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        kind, on_cpu = self.config._attn_implementation, cpu.fits(hidden_states, *position_embeddings)
        unknown = kind not in ALL_ATTENTION_FUNCTIONS or not (on_cpu or hidden_states.is_cuda)
        if unknown or past_key_values is not None or hidden_states.shape[0] != 1:
            return self.plain(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        shape = (hidden_states.shape[1], -1, self.head_dim)  # [T, heads, D]
        if self.merged is not None:
            projected = self.merged(hidden_states[0])
        else:
            projected = (self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states))
        query, key, value = (x.view(shape) for x in projected)
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        cos, sin = (x.reshape(-1, self.head_dim) for x in position_embeddings)
        if on_cpu:
            query, key = cpu.Rotate.apply(query, cos, sin), cpu.Rotate.apply(key, cos, sin)
        else:
            from quadriga.models.kernels.rotary import rotate

            query, key = rotate(query, key, cos, sin)
        attended, weights = ALL_ATTENTION_FUNCTIONS[kind](
            self,
            *(x.transpose(0, 1).unsqueeze(0) for x in (query, key, value)),
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **self.capped,
            **kwargs,
        )
        return self.o_proj(attended.reshape(*hidden_states.shape[:-1], -1)), weights
