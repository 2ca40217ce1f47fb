"""The parts of a module that `Program` computes with, and the proof that there are no others."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quadriga.config.memory import PROGRAM_FAMILIES, PROGRAM_WEIGHTS
from quadriga.models.fused import FusedAttention, FusedMLP, FusedRMSNorm, is_altered
from quadriga.models.kernels.cpu.linear import FusedLinear


class UnknownPartError(Exception):
    """The module has a part that the program does not compute."""


class Parts:
    """A causal LM of one of `PROGRAM_FAMILIES`, fused (`quadriga.models.fused`); UnknownPartError for anything else.

    Every module must be of exactly the class that the program knows, without hooks, and no weight may be left over: so
    adapters, shards, other dtypes and whatever somebody adds to the families are left to the module itself.
    """

    def __init__(self, module: Any) -> None:
        self._seen: set[int] = set()
        self._source, name = type(module).__module__, type(module).__name__
        where, family = self._source.split("."), name.removesuffix("ForCausalLM")
        if (
            where[:2] != ["transformers", "models"]
            or where[2] not in PROGRAM_FAMILIES
            or not name.endswith("ForCausalLM")
        ):
            raise UnknownPartError(name)
        self._accept(module, name)
        model = self._child(module, "model", f"{family}Model")
        self.embedding = self._child(model, "embed_tokens", nn.Embedding).weight
        self.rotary = self._child(model, "rotary_emb", f"{family}RotaryEmbedding")
        self.norm = self._child(model, "norm", FusedRMSNorm)
        self.head = self._linear(module, "lm_head")
        self.layers = list(self._child(model, "layers", nn.ModuleList))
        self.norms = [self.norm]
        for layer in self.layers:
            self._add_layer(layer, f"{family}DecoderLayer")
        self.eps = self.norm.variance_epsilon
        if any(norm.variance_epsilon != self.eps for norm in self.norms):
            raise UnknownPartError("norms of different kinds")
        self._check_weights(module)

    def _add_layer(self, layer: Any, kind: str) -> None:
        self._accept(layer, kind)
        attention, mlp = self._child(layer, "self_attn", FusedAttention), self._child(layer, "mlp", FusedMLP)
        normed = [(layer, "input_layernorm"), (layer, "post_attention_layernorm")]
        if hasattr(attention, "q_norm"):
            normed += [(attention, "q_norm"), (attention, "k_norm")]
        self.norms += [self._child(*place, FusedRMSNorm) for place in normed]
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self._linear(attention, name)
        for name in ("gate_proj", "up_proj", "down_proj"):
            self._linear(mlp, name)

    def _linear(self, parent: Any, name: str) -> Any:
        kind = type(getattr(parent, name, None))
        return self._child(parent, name, nn.Linear if kind is nn.Linear else FusedLinear)

    def _child(self, parent: Any, name: str, kind: type | str) -> Any:
        child = getattr(parent, name, None)
        self._accept(child, kind)
        return child

    def _accept(self, child: Any, kind: type | str) -> None:
        """Note `child` as seen, if it is of exactly this class (a name: of transformers) and nobody changed how it computes."""
        theirs = isinstance(kind, str) and (type(child).__module__, type(child).__name__) == (self._source, kind)
        if not theirs and type(child) is not kind:
            raise UnknownPartError(f"{type(child).__name__} in the place of {kind}")
        if is_altered(child):
            raise UnknownPartError(f"a hook on {type(child).__name__}")
        self._seen.add(id(child))

    def _check_weights(self, module: Any) -> None:
        for name, child in module.named_modules():
            if id(child) not in self._seen and (child._parameters or child._buffers):
                raise UnknownPartError(f"weights of {name}")
        weights = dict(module.named_parameters())
        for name, weight in weights.items():
            if type(weight) is not nn.Parameter or weight.dtype != torch.float32 or not weight.is_contiguous():
                raise UnknownPartError(f"{name} of another dtype or layout")
        if sum(weight.numel() for weight in weights.values()) > PROGRAM_WEIGHTS:
            raise UnknownPartError(f"more than {PROGRAM_WEIGHTS} weights")
