"""The structures of the C files, by the same names and in the same order."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from typing import ClassVar

COLUMNS = 16
"""The keys of a cache block have room for a multiple of this: of the vectors of every machine, see attention.h."""


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Cache(Structure):
    _fields_: ClassVar = [*_fields(c_void_p, "keys values"), *_fields(c_int64, "kv_heads size block_size columns")]


class Weight(Structure):
    _fields_: ClassVar = [("panels", c_void_p), *_fields(c_int64, "inner outer")]


class Member(Structure):
    _fields_: ClassVar = _fields(c_int64, "rank size")


class Layer(Structure):
    _fields_: ClassVar = [
        *_fields(c_void_p, "norm q_norm k_norm mlp_norm"),
        *_fields(Weight, "qkv out gate_up down"),
        *_fields(c_void_p, "keys values"),
        ("window", c_int64),
        ("scale", c_float),
    ]


class Model(Structure):
    _fields_: ClassVar = [
        *_fields(c_void_p, "embedding cos sin norm"),
        ("layers", POINTER(Layer)),
        ("head", Weight),
        *_fields(c_int64, "num_layers width heads kv_heads size block_size columns"),
        ("eps", c_float),
    ]


class Step(Structure):
    _fields_: ClassVar = [
        *_fields(c_void_p, "tokens positions sequences outputs tables"),
        *_fields(c_int64, "rows num_outputs table_width longest mixed"),
        *_fields(c_void_p, "scratch logits"),
    ]
