"""A pass through the model as one call: the module's own weights, packed for a program in C (`kernels/cpu/program.c`)."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quadriga.models.kernels.cpu.library import Layer, Model, Step, Weight, huge_zeros, kernels
from quadriga.models.kernels.cpu.operations import pointers
from quadriga.rollout.native.kv_cache import KVCache
from quadriga.rollout.native.program_parts import Parts, UnknownPartError


@dataclass(frozen=True, eq=False)
class Rows:
    """Tokens of a pass, several of a sequence beside each other and in the order of their positions. Arrays of int64."""

    tokens: np.ndarray
    """`[T]`"""
    positions: np.ndarray
    """`[T]`"""
    sequences: np.ndarray
    """`[T]` rows of `tables`"""
    outputs: np.ndarray
    """`[R]` rows whose logits are wanted"""
    tables: np.ndarray
    """`[S, W]` blocks of each sequence"""


class Program:
    """Runs rows through the weights that the module had when `refresh` was called last.

    UnknownPartError, from `refresh` too, if it cannot compute what the module computes.

    Args:
        cache: of kernels for CPUs.
        max_outputs: most rows of a pass whose logits are wanted.
        max_tokens: of the longest sequence.
    """

    def __init__(self, module: Any, cache: KVCache, max_outputs: int, max_tokens: int) -> None:
        parts, shape, geometry = Parts(module), cache.shape, cache.structures[0]
        self.module = module
        self.windows = {layer.self_attn.sliding_window for layer in parts.layers}
        self._packed: list[_Packed] = []
        self._layers = (Layer * shape.layers)()
        for target, layer, store in zip(self._layers, parts.layers, cache.structures, strict=True):
            self._fill(target, layer)
            target.keys, target.values = store.keys, store.values
        with torch.no_grad():
            angles = parts.rotary(parts.embedding[:1, :1], torch.arange(max_tokens)[None])
        self._angles = [x[0].contiguous() for x in angles]  # cosines and sines
        if any(x.shape != (max_tokens, shape.head_dim) or x.dtype != torch.float32 for x in self._angles):
            raise UnknownPartError("positions of another kind")
        self._model = Model(
            *pointers(parts.embedding, *self._angles, parts.norm.weight),
            self._layers,
            self._weight(parts.head),
            *(shape.layers, parts.embedding.shape[1], shape.heads, shape.kv_heads, shape.head_dim),
            *(geometry.block_size, geometry.columns, parts.eps),
        )
        self._scratch, self._logits = torch.empty(0), huge_zeros(max_outputs, parts.head.out_features)
        # What is read where it lies must stay there, whatever the module does meanwhile.
        self._held = [p.detach() for p in (parts.embedding, *(norm.weight for norm in parts.norms))]
        self._addresses = _addresses(module)
        self._packed_from: Any = None

    def refresh(self, updates: int) -> bool:
        """Pack the module's weights if they have changed: `updates` counts changes that tensors may not tell of.

        False if they are not where they were, so that another program must be made.
        """
        Parts(
            self.module
        )  # hooks or adapters may have come since: then the program is no longer what the module computes
        if _addresses(self.module) != self._addresses:
            return False
        # A tensor counts its changes in place, unless it was made in inference mode; then only `updates` tells of them.
        now = updates, [0 if p.is_inference() else p._version for p in self.module.parameters()]
        if now != self._packed_from:
            for packed in self._packed:
                packed.fill()
            self._packed_from = now
        return True

    def run(self, rows: Rows, waits: bool) -> Tensor:
        """Logits `[R, V]`, good until the next call; keys and values of all rows are in the cache then.

        `waits`: rows may read what other rows write, of their own sequence or of a block that they share.
        """
        inputs = [np.ascontiguousarray(getattr(rows, field.name)) for field in fields(rows)]
        tokens, outputs, longest = len(rows.tokens), len(rows.outputs), int(rows.positions.max()) + 1
        model, mixed = ctypes.byref(self._model), waits or len(rows.tables) < tokens or outputs < tokens
        room = kernels().program_room(model, tokens, longest)
        if room > self._scratch.numel():
            self._scratch = huge_zeros(room + room // 4)
        counts = tokens, outputs, rows.tables.shape[1], longest, mixed
        step = Step(*(x.ctypes.data for x in inputs), *counts, *pointers(self._scratch, self._logits))
        kernels().run_program(model, ctypes.byref(step))
        return self._logits[:outputs]

    def _fill(self, target: Layer, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        norms = layer.input_layernorm, layer.post_attention_layernorm
        target.norm, target.mlp_norm = pointers(*(norm.weight for norm in norms))
        if hasattr(attention, "q_norm"):
            target.q_norm, target.k_norm = pointers(attention.q_norm.weight, attention.k_norm.weight)
        target.qkv = self._weight(attention.q_proj, attention.k_proj, attention.v_proj)
        target.out = self._weight(attention.o_proj)
        target.gate_up = self._weight(mlp.gate_proj, mlp.up_proj, by_turns=True)
        target.down = self._weight(mlp.down_proj)
        target.window, target.scale = attention.sliding_window or 0, attention.scaling

    def _weight(self, *linears: nn.Linear, by_turns: bool = False) -> Weight:
        packed = _Packed(linears, by_turns)
        self._packed.append(packed)
        outer = [linear.out_features for linear in linears]
        return Weight(packed.panels.data_ptr(), linears[0].in_features, outer[0] if by_turns else sum(outer))


class _Packed:
    """Linear layers as columns of panels, see products.h: one after the other, or half a panel of each by turns.

    By turns for the gate and the up-projection of an MLP: silu(gate) · up is then taken from one tile of results while it is in
    registers, and the two never go to memory.
    """

    def __init__(self, linears: tuple[nn.Linear, ...], by_turns: bool) -> None:
        self.linears, width = linears, kernels().panel_width()
        sizes = [linear.out_features for linear in linears]
        # Rows of a weight go into runs of so many columns; the next run begins a period later.
        self.run: int = width // len(linears) if by_turns else 1
        self.period: int = width if by_turns else 1
        self.starts = [0, self.run] if by_turns else [0, *itertools.accumulate(sizes[:-1])]
        columns = sizes[0] * len(linears) if by_turns else sum(sizes)
        self.panels = huge_zeros(-(-columns // width), linears[0].in_features + 1, width)

    def fill(self) -> None:
        for linear, start in zip(self.linears, self.starts, strict=True):
            bias = None if linear.bias is None else linear.bias.data_ptr()
            places = start, self.run, self.period, self.panels.data_ptr()
            kernels().pack_weight(linear.weight.data_ptr(), bias, *linear.weight.shape, *places)


def _addresses(module: Any) -> list[int]:
    return [p.data_ptr() for p in module.parameters()]
