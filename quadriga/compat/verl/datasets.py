"""`verl.utils.dataset` and `verl.experimental.dataset.sampler`: prompts, examples and samplers of users' own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, fields
from functools import wraps
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from torch.utils.data import Dataset, Sampler

from quadriga.config.load import typed_config
from quadriga.config.schema import DataConfig
from quadriga.config.typed import Problems
from quadriga.data import create_rl_dataset as _create_rl_dataset
from quadriga.data import create_rl_sampler as _create_rl_sampler
from quadriga.data.chat import ChatEncoder, Prompt
from quadriga.data.example_dataset import SFTDataset as _SFTDataset
from quadriga.data.files import ListRows, Row, Rows
from quadriga.data.loader import collate_prompts
from quadriga.data.rl_dataset import RLDataset

__all__ = ["create_rl_dataset", "create_rl_sampler"]


def _read(config: Any, key: str, default: Any) -> Any:
    found = config.get(key, default) if hasattr(config, "get") else getattr(config, key, default)
    return default if found is None else found


class _ReadsSections(type):
    """Constructors written for verl look into a section as Hydra gives it, with `get`."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*map(_as_section, args), **{name: _as_section(value) for name, value in kwargs.items()})


def _as_section(value: Any) -> Any:
    if not isinstance(value, DataConfig):
        return value
    section = OmegaConf.create(asdict(value))
    OmegaConf.set_struct(section, True)
    return section


class RLHFDataset(RLDataset, Dataset, metaclass=_ReadsSections):
    """Prompts of parquet, json or jsonl files. `config` is the section `data`, as verl has it or as Quadriga has it.

    Subclasses may read rows of their own into `self.dataframe` (`_read_files_and_tokenize`), write the prompt of a row
    (`_build_messages`), or make the items (`__getitem__`): with `raw_prompt`, or `raw_prompt_ids`, and what else they like.
    """

    def __init__(
        self, data_files: Any, tokenizer: Any, config: Any, processor: Any = None, max_samples: int = -1
    ) -> None:
        self.tokenizer, self.processor, self.config, self.max_samples = tokenizer, processor, config, max_samples
        self.data_files = [data_files] if isinstance(data_files, str) else list(data_files)
        self.prompt_key = _read(config, "prompt_key", "prompt")
        self.max_prompt_length = _read(config, "max_prompt_length", 1024)
        self.filter_overlong_prompts = _read(config, "filter_overlong_prompts", True)
        self.truncation = _read(config, "truncation", "error")
        template = (
            _read(config, "chat_template", None),
            dict(_read(config, "apply_chat_template_kwargs", {})),
        )
        self._encoder = ChatEncoder(tokenizer, *template)
        self.dataframe: Any = None
        self._read_files_and_tokenize()
        super().__init__(
            self.data_files,
            tokenizer,
            max_prompt_length=self.max_prompt_length,
            prompt_key=self.prompt_key,
            reward_fn_key=_read(config, "reward_fn_key", "data_source"),
            filter_overlong_prompts=self.filter_overlong_prompts,
            truncation=self.truncation,
            max_samples=max_samples,
            shuffle=_read(config, "shuffle", False),
            seed=_read(config, "seed", 1),
            chat_template=template[0],
            apply_chat_template_kwargs=template[1],
        )
        self.dataframe = _Kept(self)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__getitem__" in cls.__dict__:
            cls.__getitem__ = _fitting(cls.__getitem__)  # type: ignore[method-assign]

    def _read_files_and_tokenize(self) -> None:
        """Hook: a subclass puts rows of its own, by position, into `self.dataframe`; else those of the files are read."""

    def _build_messages(self, example: dict[str, Any]) -> Any:
        """Hook: the prompt of a row."""
        return example.get(self.prompt_key)

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """As it is: prompts over the limit leave when all are tokenised."""
        return dataframe

    def on_batch_end(self, batch: Any) -> None:
        """Hook of verl's; nothing calls it."""

    def _load(self, data_files: Any) -> Rows:
        if self.dataframe is None:
            return super()._load(data_files)
        return Rows([(type(self).__name__, ListRows(self.dataframe))])

    def _prompt(self, row: Row, index: int) -> Prompt:
        return super()._prompt({**row, self.prompt_key: self._build_messages(dict(row))}, index)


class _Kept:
    """The rows of a dataset that are left after filtering, by position."""

    def __init__(self, dataset: RLHFDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, position: int) -> Row:
        if not 0 <= position < len(self):
            raise IndexError(f"row {position} of {len(self)}")
        return dict(self._dataset.rows.read(self._dataset.indices[position : position + 1])[0])

    @property
    def column_names(self) -> list[str]:
        return list(self[0])


MADE_HERE = ("input_ids", "attention_mask", "position_ids", "dummy_tensor")


def _fitting(make_item: Any) -> Any:
    """Items as a subclass makes them, in the form that the loader wants: prompts as their own ids, without padding."""

    @wraps(make_item)
    def fitted(self: RLHFDataset, position: int) -> dict[str, Any]:
        item = dict(make_item(self, position))
        if "input_ids" in item and "attention_mask" not in item:
            return item  # made by the class above
        index, row = int(self.indices[position]), self.dataframe[position]
        prompt = item.get("raw_prompt")
        prompt = self._prompt(row, index) if prompt is None else prompt if isinstance(prompt, str) else list(prompt)
        ids = item.pop("raw_prompt_ids", None)
        if ids is None:
            ids = self._encoder.encode_prompts([prompt], lambda _: self.rows.where(index))[0]
        kept = {name: value for name, value in item.items() if name not in MADE_HERE}
        usual = {"data_source": self._source(row), "reward_model": row.get("reward_model") or {}}
        usual |= {"extra_info": row.get("extra_info") or {}, self.reward_fn_key: self._source(row)}
        return {**usual, **kept, "input_ids": np.asarray(ids, np.int32), "raw_prompt": prompt, "index": index}

    return fitted


class SFTDataset(_SFTDataset):
    """Examples of files, by a section `data` of the supervised trainer."""

    def __init__(self, parquet_files: Any, tokenizer: Any, config: Any, max_samples: int = -1) -> None:
        multi_turn = _read(config, "multiturn", {})
        messages = _read(multi_turn, "messages_key", "messages") if _read(multi_turn, "enable", False) else None
        super().__init__(
            parquet_files,
            tokenizer,
            prompt_key=_read(config, "prompt_key", "prompt"),
            response_key=_read(config, "response_key", "response"),
            prompt_dict_keys=_read(config, "prompt_dict_keys", None),
            response_dict_keys=_read(config, "response_dict_keys", None),
            messages_key=_read(config, "messages_key", messages),
            max_length=_read(config, "max_length", 1024),
            truncation=_read(config, "truncation", "error"),
            max_samples=max_samples,
        )


class MultiTurnSFTDataset(SFTDataset):
    """Conversations, in the column `messages` unless `config` names another."""

    def __init__(self, parquet_files: Any, tokenizer: Any, config: Any, max_samples: int = -1, **kwargs: Any) -> None:
        named = _read(_read(config, "multiturn", {}), "messages_key", "messages")
        whole = {**dict(config or {}), "messages_key": _read(config, "messages_key", named)}
        super().__init__(parquet_files, tokenizer, whole, max_samples)


def create_rl_dataset(
    data_paths: Any,
    data_config: Any,
    tokenizer: Any,
    processor: Any = None,
    is_train: bool = True,
    max_samples: int = -1,
) -> Any:
    """Prompts by a section `data`, verl's or Quadriga's; a class of `data.custom_cls` is given the section as it is."""
    own = get_dataset_class(data_config)
    if own is not RLHFDataset:
        return own(
            data_files=data_paths, tokenizer=tokenizer, processor=processor, config=data_config, max_samples=max_samples
        )
    return _create_rl_dataset(data_paths, _typed(data_config), tokenizer, processor, is_train, max_samples)


def create_rl_sampler(data_config: Any, dataset: Any) -> Any:
    """The sampler of a section `data`, verl's or Quadriga's; a class of `data.sampler` is given the section as it is."""
    sampler = _read(data_config, "sampler", {})
    if not _read(sampler, "class_path", None):
        return _create_rl_sampler(_typed(data_config), dataset)
    from quadriga.compat.verl.utilities import load_extern_object

    own = load_extern_object(_read(sampler, "class_path", ""), _read(sampler, "class_name", ""))
    return state_of(own(data_source=dataset, data_config=data_config))


def _typed(data_config: Any) -> DataConfig:
    """The section with Quadriga's keys alone; what verl leaves open has Quadriga's default."""
    if isinstance(data_config, DataConfig):
        return data_config
    given = {field.name: _read(data_config, field.name, None) for field in fields(DataConfig)}
    plain = OmegaConf.to_container(OmegaConf.create({k: v for k, v in given.items() if v is not None}), resolve=True)
    return typed_config({"data": plain}, Problems()).data


def collate_fn(data_list: list[dict[str, Any]]) -> dict[str, Any]:
    """Items as one dict: tensors stacked on the left-padded width, everything else as object arrays."""
    batch = collate_prompts(data_list, pad_token_id=0)
    return {**dict(batch.batch.items()), **batch.non_tensor_batch}


def get_dataset_class(data_config: Any) -> type:
    """The class that `data.custom_cls` names, or `RLHFDataset`."""
    custom = _read(data_config, "custom_cls", {})
    if not _read(custom, "path", None):
        return RLHFDataset
    from quadriga.compat.verl.utilities import load_extern_object

    return load_extern_object(_read(custom, "path", ""), _read(custom, "name", ""))


class _Counted:
    """A sampler of torch's kind, as the loader wants them: it can tell how many positions of an epoch it has given."""

    def __init__(self, sampler: Any) -> None:
        self.sampler, self._given, self._to_skip = sampler, 0, 0

    def __iter__(self) -> Iterator[int]:
        skip, self._to_skip, self._given = self._to_skip, 0, 0
        for position in self.sampler:
            self._given += 1
            if self._given > skip:
                yield int(position)
        self._given = 0

    def __len__(self) -> int:
        return len(self.sampler)

    def state_dict(self) -> dict[str, Any]:
        return {"given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._to_skip = int(state.get("given", 0))

    def update(self, batch: Any) -> None:
        if hasattr(self.sampler, "update"):
            self.sampler.update(batch)


def state_of(sampler: Any) -> Any:
    """The sampler itself, or with what the loader asks of one beside positions."""
    complete = all(hasattr(sampler, name) for name in ("state_dict", "load_state_dict", "update"))
    return sampler if complete else _Counted(sampler)


class AbstractSampler(Sampler, metaclass=_ReadsSections):
    """Which rows come next; subclasses have `__iter__` and `__len__`.

    A resumed run begins the epoch anew and passes over the rows that were given; a sampler whose order depends on more
    than that gives its own `state_dict` and `load_state_dict`.
    """

    _given = 0
    _to_skip = 0

    def __init__(self, data_source: Any, data_config: Any) -> None:
        self.data_source, self.data_config = data_source, data_config

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__iter__" in cls.__dict__:
            cls.__iter__ = _counted(cls.__iter__)  # type: ignore[method-assign]

    def __iter__(self) -> Iterator[int]:
        raise NotImplementedError("a sampler gives the positions of an epoch by __iter__")

    def __len__(self) -> int:
        return len(self.data_source)

    def state_dict(self) -> dict[str, Any]:
        return {"given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._to_skip = int(state.get("given", 0))

    def update(self, batch: Any) -> None:
        """Called with the scored batch after each step; a curriculum learns from it."""


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler whose `update(batch)` changes what comes next."""


def _counted(iterate: Any) -> Any:
    """The rows of an epoch, counted, so that a resumed run can pass over those that were given."""

    def counted(self: AbstractSampler) -> Iterator[int]:
        skip, self._to_skip = self._to_skip, 0
        self._given = 0
        for position in iterate(self):
            self._given += 1
            if self._given > skip:
                yield int(position)
        self._given = 0

    return counted
