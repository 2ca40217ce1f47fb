"""Weights of a model folder, read part by part: each rank takes from the files what it will hold, and nothing else.

Which tensor of the files becomes which weight is what transformers says (`get_model_conversion_mapping`): most are the same
under the same name, some have another name, and some are made of several tensors, as a layer's stack of experts is of files
that hold each expert by itself. What is made of several is put together for one weight at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quadriga.models.weight_files import read_header, weight_files

_TORCH_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def blank(self) -> Tensor:
        """The tensor without its numbers."""
        return torch.empty(self.shape, dtype=_TORCH_TYPES.get(self.dtype, torch.int32), device="meta")


@dataclass
class Recipe:
    """How some weights, mostly one, come out of stored tensors.

    Attributes:
        converter: transformers' `WeightConverter`; None: the one tensor is the weight.
        parts: the tensors, by the converter's pattern that their names match.
    """

    converter: Any = None
    parts: dict[str, list[Stored]] = field(default_factory=dict)

    @property
    def is_stack(self) -> bool:
        """Whether the n-th row of the weight is made of the n-th tensor of each pattern, as with experts."""
        from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

        if self.converter is None:
            return False
        first, *rest = self.converter.operations
        keeps_rows = all(
            (isinstance(op, Concatenate) and op.dim != 0) or (isinstance(op, Transpose) and 0 not in (op.dim0, op.dim1))
            for op in rest
        )
        return isinstance(first, MergeModulelist) and first.dim == 0 and keeps_rows


class WeightReader:
    """The weights of `module`, an outline, in the files of a model folder.

    Attributes:
        info: how they fit, as `from_pretrained(…, output_loading_info=True)` says it, for `check_fit`.
        uses: whether a weight of this name matters; the output head of a model that gets another one does not.
    """

    def __init__(self, module: Any, folder: Path) -> None:
        self.folder = folder
        self.uses: Callable[[str], bool] = lambda name: True
        self._module = module
        self._wanted: dict[str, Tensor] = module.state_dict(keep_vars=True)
        self._recipes: dict[str, Recipe] = {}
        self._open: dict[Path, Any] = {}
        self._made: tuple[Recipe | None, dict[str, Tensor]] = (None, {})
        stored = [
            Stored(file, key, tuple(entry["shape"]), entry["dtype"])
            for file in weight_files(folder)
            for key, entry in read_header(file).items()
        ]
        unexpected, mismatched = self._match(stored)
        self.info = {
            "missing_keys": self._missing(name for name, *_ in mismatched),
            "unexpected_keys": _without(unexpected, self._ignored()),
            "mismatched_keys": mismatched,
        }

    def _match(self, stored: list[Stored]) -> tuple[set[str], set[tuple[str, Any, Any]]]:
        """Find the recipe of every weight. Returns what is left over, and what has another shape."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        module, wanted = self._module, self._wanted
        transforms = get_model_conversion_mapping(module)
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        recipes: dict[str, Recipe] = {}
        unexpected: set[str] = set()
        for tensor in sorted(stored, key=lambda tensor: dot_natural_key(tensor.key)):
            prefix = module.base_model_prefix
            name, pattern = rename_source_key(tensor.key, renamings, converters, prefix, wanted)
            if name not in wanted and tensor.key in wanted:
                name, pattern = tensor.key, None
            if name not in wanted:
                unexpected.add(name)
                continue
            if pattern is None:
                recipes[name] = Recipe(None, {tensor.key: [tensor]})
            else:
                recipe = recipes.setdefault(name, Recipe(deepcopy(by_pattern[pattern])))
                recipe.parts.setdefault(pattern, []).append(tensor)
        mismatched: set[tuple[str, Any, Any]] = set()
        for first, recipe in recipes.items():
            blanks = {pattern: [tensor.blank for tensor in tensors] for pattern, tensors in recipe.parts.items()}
            for name, made in self._cook(first, recipe, blanks).items():
                if name not in wanted:
                    unexpected.add(name)
                elif made.shape != wanted[name].shape:
                    mismatched.add((name, tuple(made.shape), tuple(wanted[name].shape)))
                else:
                    self._recipes[name] = recipe
        # How names and shapes on disk differ from those in memory; a checkpoint's export turns it round.
        module._weight_conversions = [transform for transform in transforms if transform.was_used()]
        return unexpected, mismatched

    def _missing(self, mismatched: Iterable[str]) -> set[str]:
        """Names that no file has, nor one of the names of the same weight."""
        there = {id(self._wanted[name]) for name in (*self._recipes, *mismatched)}
        missing = {name for name, tensor in self._wanted.items() if id(tensor) not in there}
        return _without(missing, self._module._keys_to_ignore_on_load_missing or ())

    def _ignored(self) -> Iterator[str]:
        """Patterns of names that the model has no use for: tables that it computes by itself, say."""
        yield from self._module._keys_to_ignore_on_load_unexpected or ()
        tables = {name.rpartition(".")[2] for name, _ in self._module.named_buffers()}
        if "inv_freq" in tables:
            yield r"rotary_emb\.inv_freq"
        if "position_ids" in tables:
            yield r"(^|\.)position_ids$"

    # ---- reading -----------------------------------------------------------------------------------------------------

    def names_of(self, model: nn.Module) -> dict[str, str]:
        """The names here of those parameters of `model` that are parameters of the outline, by their names there."""
        ours = {id(tensor): name for name, tensor in self._wanted.items() if name in self._recipes}
        return {name: ours[id(p)] for name, p in model.named_parameters() if id(p) in ours}

    def aliases(self, name: str) -> list[str]:
        """Other names under which the files have the same weight too: an output head that is tied to the embedding."""
        weight = self._wanted[name]
        return [
            other for other in self._recipes if self._wanted[other] is weight and other != name and self.uses(other)
        ]

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """These rows (of the first dimension) of a weight, on the CPU, in the type of the file."""
        recipe = self._recipes[name]
        if recipe.converter is None:
            ((tensor,),) = recipe.parts.values()
            return self._rows(tensor, rows)
        if recipe.is_stack:
            parts = {pattern: tensors[rows] for pattern, tensors in recipe.parts.items()}
            if not next(iter(parts.values())):
                return torch.empty(0, *self._wanted[name].shape[1:])
            return self._cook(name, recipe, self._taken(parts))[name]
        if self._made[0] is not recipe:  # queries, keys and values may be one tensor in the file
            self._made = recipe, self._cook(name, recipe, self._taken(recipe.parts))
        return self._made[1][name][rows]

    def read_buffers(self) -> None:
        """Fill the module's own buffers that files hold: few and small, so every rank has them whole."""
        for name, buffer in self._module.named_buffers():
            if name in self._recipes:
                buffer.copy_(self.read(name))

    def close(self) -> None:
        self._open.clear()
        self._made = (None, {})

    def _taken(self, parts: dict[str, list[Stored]]) -> dict[str, list[Tensor]]:
        return {pattern: [self._rows(tensor, slice(None)) for tensor in tensors] for pattern, tensors in parts.items()}

    def _rows(self, tensor: Stored, rows: slice) -> Tensor:
        from safetensors import safe_open

        if tensor.file not in self._open:
            self._open[tensor.file] = safe_open(tensor.file, framework="pt")
        file = self._open[tensor.file]
        if not tensor.shape or rows == slice(None):
            return file.get_tensor(tensor.key)
        return file.get_slice(tensor.key)[rows]

    def _cook(self, name: str, recipe: Recipe, parts: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        """The weights that `recipe`, found under `name`, makes of the tensors."""
        if recipe.converter is None:
            return {name: next(iter(parts.values()))[0]}
        converter = deepcopy(recipe.converter)
        for pattern, tensors in parts.items():
            for tensor, stored in zip(tensors, recipe.parts[pattern], strict=False):
                converter.add_tensor(name, stored.key, pattern, lambda tensor=tensor: tensor)
        made = converter.convert(name, model=self._module, config=self._module.config)
        return {key: value[0] if isinstance(value, list) else value for key, value in made.items()}


def _without(names: set[str], patterns: Any) -> set[str]:
    ignored = [re.compile(pattern) for pattern in patterns]
    return {name for name in names if not any(pattern.search(name) for pattern in ignored)}
