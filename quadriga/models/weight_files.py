"""Weights on disk against the model that is to have them: a file that is cut off, and tensors that do not fit, are named."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quadriga.errors import DataError

INDEX = "model.safetensors.index.json"
LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header."""
SHOWN = 8


def check_weight_files(folder: Path) -> None:
    """DataError for a safetensors file of a model folder that is missing, cut off or garbled. Reads the headers only."""
    for file in weight_files(folder):
        tensors = read_header(file)
        ends = [entry["data_offsets"][1] for entry in tensors.values()]
        expected = LENGTH_BYTES + _header_bytes(file) + max(ends, default=0)
        if file.stat().st_size != expected:
            raise DataError(
                f"{file} has {file.stat().st_size:,} bytes, but its header describes {expected:,}",
                "the file was cut off on its way here: fetch it again",
            )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers reads from a model folder."""
    if not (folder / INDEX).is_file():
        return [file for file in [folder / "model.safetensors"] if file.is_file()]
    try:
        names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DataError(f"{folder / INDEX} is no index of weights: {error}", "fetch the file again") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise DataError(f"{folder / INDEX} lists files that are not there: {_listed(missing)}", "fetch them too")
    return [folder / name for name in names]


def check_fit(info: Mapping[str, Any], source: Path | str, uses: Callable[[str], bool] = lambda name: True) -> None:
    """DataError unless every weight of a model is in `source`, with its shape, and nothing is left over.

    Args:
        info: what `from_pretrained(…, output_loading_info=True, ignore_mismatched_sizes=True)` says, or a `WeightReader`.
        uses: whether a weight of this name matters; a head that is replaced does not.
    """
    wrong = {
        "missing": [name for name in sorted(info["missing_keys"]) if uses(name)],
        "unexpected": [name for name in sorted(info["unexpected_keys"]) if uses(name)],
        "of another shape": [
            f"{name} {list(stored)} instead of {list(wanted)}"
            for name, stored, wanted in sorted(info["mismatched_keys"])
            if uses(name)
        ],
    }
    if problems := [f"  {kind}: {_listed(names)}" for kind, names in wrong.items() if names]:
        raise DataError("\n".join([f"the weights of {source} do not fit its config.json", *problems]), _fix(wrong))


def check_weights(
    model: Any, info: Mapping[str, Any], source: Path | str, uses: Callable[[str], bool] = lambda name: True
) -> None:
    """`check_fit`, and of a model that is loaded whole: its weights are finite, and tied where config.json says so."""
    check_fit(info, source, uses)
    head = model.get_output_embeddings()
    # transformers unties two weights that differ, whatever config.json says; whoever builds from that would tie them.
    apart = head is not None and head.weight is not model.get_input_embeddings().weight
    if apart and uses("lm_head.weight") and getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        raise tied_by_mistake(source)
    for name, weight in model.named_parameters():
        require_finite(name, weight.detach(), source)


def tied_by_mistake(source: Path | str) -> DataError:
    return DataError(
        f"config.json of {source} says tie_word_embeddings: true, but its weights hold an output head that differs "
        "from the input embeddings",
        "set tie_word_embeddings to false in its config.json, if the head is what was trained",
    )


def require_finite(name: str, weight: Tensor, source: Path | str) -> None:
    """DataError, with its place, if some of the numbers of a weight, or of a part of it, are not finite."""
    # A sum is one pass without a copy; only where it is not finite is it worth looking closer.
    if not torch.isfinite(weight.sum(dtype=torch.float32)) and not torch.isfinite(weight).all():
        bad = int((~torch.isfinite(weight)).sum())
        raise DataError(
            f"{_place_of(name, source)}: {name} has {bad:,} of {weight.numel():,} numbers that are not finite",
            "fetch the model again, or start from an earlier checkpoint of it",
        )


def _place_of(name: str, source: Path | str) -> str:
    if isinstance(source, Path):
        for file in weight_files(source):
            if name in read_header(file):
                return str(file)
    return str(source)


def _header_bytes(file: Path) -> int:
    with file.open("rb") as stream:
        return int.from_bytes(stream.read(LENGTH_BYTES), "little")


def read_header(file: Path) -> dict[str, Any]:
    """Name → dtype, shape and place of every tensor."""
    try:
        length, size = _header_bytes(file), file.stat().st_size
        if size < LENGTH_BYTES + length:
            raise ValueError(f"it has {size:,} bytes, too few for its own header")
        with file.open("rb") as stream:
            stream.seek(LENGTH_BYTES)
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        return {str(name): _tensor(entry) for name, entry in header.items()}
    except OSError as error:
        raise DataError(
            f"{file} cannot be read: {error.strerror or error}", "check who may read it, and its disk"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{file} is no whole safetensors file: {error}", "fetch the file again") from error


def _tensor(entry: dict[str, Any]) -> dict[str, Any]:
    begin, end = map(int, entry["data_offsets"])
    return {**entry, "shape": list(map(int, entry["shape"])), "data_offsets": [begin, end]}


def _listed(names: list[str]) -> str:
    more = f", … {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _fix(wrong: Mapping[str, list[str]]) -> str:
    if wrong["missing"] == ["lm_head.weight"]:
        return "if the model has no output head of its own, set tie_word_embeddings to true in its config.json"
    return (
        "fetch the model again if a file of it is missing; else correct num_hidden_layers, vocab_size and the other sizes in "
        "its config.json (or model.override_config)"
    )
