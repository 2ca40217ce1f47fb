"""From configuration to datasets, samplers and batches. `data_config` is a `quadriga.config` DataConfig."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from quadriga.data.example_dataset import PreferenceDataset, SFTDataset
from quadriga.data.loader import BatchLoader, Dataset, collate_prompts, file_order_batches
from quadriga.data.rl_dataset import RLDataset
from quadriga.data.sampler import ResumableSampler, Sampler
from quadriga.errors import ConfigError
from quadriga.registry import import_named

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from quadriga.protocol import DataProto

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
TOKEN_KEYS = ("truncation", "seed", "chat_template", "apply_chat_template_kwargs")
EXAMPLE_KEYS = (*TOKEN_KEYS, "max_length", "empty_response", "shuffle")
"""Keys of `data` that are arguments of a dataset by the same name."""


def create_rl_dataset(
    data_paths: Paths,
    data_config: Any,
    tokenizer: PreTrainedTokenizerBase,
    processor: Any = None,
    is_train: bool = True,
    max_samples: int = -1,
    default_source: str | None = None,
) -> Any:
    """An `RLDataset`, or the class that `data.custom_cls` names.

    `default_source` is the data source of rows that name none; without it they must.
    A custom class is built as `Cls(data_files=…, tokenizer=…, config=data_config, processor=…, max_samples=…)` and has
    `__len__` and `__getitem__`, whose items hold at least `input_ids`, `raw_prompt` and `data_source`.
    The processor is for such classes; `RLDataset` reads text only and rejects rows with media.
    """
    if data_config.custom_cls.path:
        custom = load_class(data_config.custom_cls.path, data_config.custom_cls.name, "data.custom_cls")
        _require(custom, ("__len__", "__getitem__"), "data.custom_cls")
        return custom(
            data_files=data_paths, tokenizer=tokenizer, config=data_config, processor=processor, max_samples=max_samples
        )
    own = ("max_prompt_length", "prompt_key", "reward_fn_key", "filter_overlong_prompts")
    return RLDataset(
        data_paths,
        tokenizer,
        default_source=default_source,
        max_samples=max_samples,
        shuffle=data_config.shuffle and is_train,
        **_values(data_config, *own, *TOKEN_KEYS),
    )


def create_rl_sampler(data_config: Any, dataset: Dataset) -> Sampler:
    """A `ResumableSampler`, or the class that `data.sampler` names (see `sampler.Sampler` for its interface)."""
    if data_config.sampler.class_path:
        custom = load_class(data_config.sampler.class_path, data_config.sampler.class_name, "data.sampler")
        _require(custom, ("__iter__", "__len__", "state_dict", "load_state_dict", "update"), "data.sampler")
        return custom(data_source=dataset, data_config=data_config)
    return ResumableSampler(len(dataset), data_config.train_batch_size, data_config.shuffle, data_config.seed)


def create_rl_loader(
    data_config: Any, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, sampler: Sampler | None = None
) -> BatchLoader:
    """Training batches of `data.train_batch_size` prompts; incomplete ones at an epoch's end are left out."""
    collate = partial(collate_prompts, pad_token_id=pad_token_id(tokenizer))
    sampler = create_rl_sampler(data_config, dataset) if sampler is None else sampler
    return BatchLoader(dataset, sampler, data_config.train_batch_size, collate)


def validation_batches(data_config: Any, dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> Iterator[DataProto]:
    """One pass over the validation set in file order, `data.val_batch_size` prompts at a time; no row is left out."""
    collate = partial(collate_prompts, pad_token_id=pad_token_id(tokenizer))
    return file_order_batches(dataset, data_config.val_batch_size, collate)


def create_sft_dataset(
    data_paths: Paths, data_config: Any, tokenizer: PreTrainedTokenizerBase, max_samples: int = -1
) -> SFTDataset:
    """The `SFTDataset` of an SFT configuration's `data` section."""
    own = ("prompt_key", "response_key", "prompt_dict_keys", "response_dict_keys", "messages_key")
    return SFTDataset(data_paths, tokenizer, max_samples=max_samples, **_values(data_config, *own, *EXAMPLE_KEYS))


def create_preference_dataset(
    data_paths: Paths, data_config: Any, tokenizer: PreTrainedTokenizerBase, max_samples: int = -1
) -> PreferenceDataset:
    """The `PreferenceDataset` of the `data` section of a reward-model or DPO configuration."""
    own = ("prompt_key", "chosen_key", "rejected_key")
    return PreferenceDataset(
        data_paths, tokenizer, max_samples=max_samples, **_values(data_config, *own, *EXAMPLE_KEYS)
    )


def _values(section: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(section, name) for name in names}


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id written where there is no token. Masks tell it apart, so any id of the vocabulary will do."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    return 0


def load_class(path: str, name: str | None, key: str) -> Any:
    """Class `name` of a Python file or dotted module (`pkg://` before it says so); `key` is the configuration section, for messages."""
    if not name:
        raise ConfigError(f"{key} names the module {path!r} but no class in it", f"set the class name in {key}")
    return import_named(path, name, key)


def _require(cls: Any, methods: tuple[str, ...], key: str) -> None:
    if missing := [method for method in methods if not hasattr(cls, method)]:
        raise ConfigError(
            f"{key}: class {cls.__name__} lacks {', '.join(missing)}", "see docs/data.md for the interface"
        )
