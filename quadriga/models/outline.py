"""Models without memory: their parameters have names and shapes but lie nowhere, until a reader fills each rank's part of them.

An outline is what is sharded: so no process ever holds a whole model, neither on its device nor in its host's memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def blank_copy(module: Any, device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A Hugging Face model like `module` on `device`, in `dtype`, frozen. Its weights are random: copy the real ones in.

    It is made from the config, so adapters and sharding of `module` do not matter. Tables such as those of the rotary
    embedding stay in float32 and are those of `module`: computed anew on another device they could differ in the last bit,
    and far positions would be turned otherwise than in training.
    """
    with torch.random.fork_rng(devices=[]), torch.device(device):  # what is drawn later does not depend on it
        blank = type(module)._from_config(copy.deepcopy(module.config), dtype=dtype)
    tables = dict(module.named_buffers())
    for name, table in blank.named_buffers():
        table.copy_(tables[name])
    blank.generation_config = module.generation_config
    return blank.requires_grad_(False).eval()


def outline(module: Any) -> Any:
    """A Hugging Face model like `module` without memory: its class, configuration, names and shapes."""
    with torch.device("meta"):
        bare = type(module)._from_config(copy.deepcopy(module.config))
    bare.generation_config = module.generation_config
    return bare


WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
SAMPLE_WIDTH, SAMPLE_WORDS = 64, 256
"""Of the MLPs and the vocabulary of a sample."""


def outline_of(model_class: Any, config: Any, **options: Any) -> Any:
    """A Hugging Face model of `config` whose parameters are on the meta device. Its buffers (tables of the rotary embedding,
    say) are real and on the CPU, as they are in a model that is loaded.

    Args:
        model_class: an Auto class, or a model's own.
        options: of `from_config`.
    """
    from accelerate import init_empty_weights

    make = getattr(model_class, "from_config", None) or model_class._from_config
    with init_empty_weights(include_buffers=False):
        module = make(copy.deepcopy(config), **options)
    module.tie_weights()
    return module


@contextmanager
def with_stand_ins(module: nn.Module) -> Iterator[None]:
    """Inside it, the parameters on the meta device seem to be on the CPU, each a single number: what is added to the module, such as an
    adapter, is then made where the numbers of a real model would be, by the same draws."""
    places = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None and parameter.is_meta
    ]
    for owner, name, parameter in places:
        stand_in = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        owner._parameters[name] = nn.Parameter(stand_in, requires_grad=parameter.requires_grad)
    try:
        yield
    finally:
        for owner, name, parameter in places:
            parameter.requires_grad_(getattr(owner, name).requires_grad)
            owner._parameters[name] = parameter


# ---- a sample --------------------------------------------------------------------------------------------------------


def sample_of(module: Any) -> Any:
    """A real model like the outline `module`, with random weights and small enough to be run anywhere: with narrow MLPs, a small
    vocabulary, and of its layers the first ones up to where every kind of layer has come."""
    count = _layers_of_all_kinds(module)
    config = _smaller(module.config)
    sample = outline_of(type(module), config, dtype=torch.float32, attn_implementation=config._attn_implementation)
    layers = _layers(sample)
    del layers[count:]
    generator = torch.Generator().manual_seed(0)
    for owner in sample.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.is_meta:
                owner._parameters[name] = nn.Parameter(_numbers(parameter, generator))
    sample.tie_weights()
    return sample


def _smaller(config: Any) -> Any:
    smaller = copy.deepcopy(config)
    text = smaller.get_text_config()
    for name in WIDTHS:
        if isinstance(width := getattr(text, name, None), int):
            setattr(text, name, min(width, SAMPLE_WIDTH))
    text.vocab_size = min(text.vocab_size, SAMPLE_WORDS)
    text.pad_token_id = None  # it may be none of the few words
    return smaller


def _numbers(parameter: nn.Parameter, generator: torch.Generator) -> torch.Tensor:
    """Such that what a layer gives is about as large as what it takes: gains about 1, maps by their number of inputs."""
    if parameter.ndim < 2:
        return torch.rand(parameter.shape, generator=generator) + 0.5
    return torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5


def _layers(module: Any) -> nn.ModuleList:
    """The list of decoder layers: of the lists of modules, the longest whose members are of the kinds that the model declares."""
    declared = set(getattr(module, "_no_split_modules", None) or ())
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList) and len(m)]
    ours = [m for m in lists if {type(layer).__name__ for layer in m} & declared]
    return max(ours or lists, key=len)


def _layers_of_all_kinds(module: Any) -> int:
    """How many of the first layers have every kind of layer among them."""
    kinds = [_kind(layer) for layer in _layers(module)]
    return max(kinds.index(kind) for kind in set(kinds)) + 1


def _kind(layer: nn.Module) -> frozenset[tuple[str, Any]]:
    """What distinguishes this layer from others: the classes in it, the shapes of its parameters, and its plain settings."""
    facts: set[tuple[str, Any]] = set()
    for name, module in layer.named_modules():
        facts.add((name, type(module).__name__))
        for key, value in vars(module).items():
            if isinstance(value, bool | int | float | str | None) and key not in ("layer_idx", "training"):
                facts.add((f"{name}.{key}", value))
        facts.update((f"{name}.{key}", tuple(p.shape)) for key, p in module._parameters.items() if p is not None)
    return frozenset(facts)
