"""From a batch of token ids to a reward tensor: what all reward managers share."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from quadriga.errors import ConfigError, DataError, RewardError
from quadriga.protocol import DataProto
from quadriga.registry import allow_name, import_named, name_of
from quadriga.rewards.functions import RewardFunction, with_columns
from quadriga.rewards.pool import RewardPool
from quadriga.rewards.result import RewardResult, RewardSample, metrics

_MAX_ERROR = 2000
"""Characters of a failed sample's traceback that are kept with the sample: its end, which says what was raised."""


class BaseRewardManager:
    """Decodes the responses of a batch, has them scored by the pool, and places each score on its response's last token.

    The batch holds `prompts` [B, P] (padded left), `responses` [B, R] (padded right) and `attention_mask` [B, P+R]; the
    non-tensors `data_source`, `reward_model` (a dict with `ground_truth`) and, optionally, `extra_info`; with a reward function
    of the user's own all three are optional.

    A batch that carries `rm_scores` [B, R] has been scored by a reward model: they are returned as they are.

    Args:
        tokenizer: Hugging Face tokenizer.
        num_examine: how many responses per data source are printed at each call.
        compute_score: the reward function, by name or as an object; None scores by data source.
        reward_fn_key: column that chooses the scorer.
        pool: the pool to score in; the manager opens one of its own when first needed if none is given.
        pool_options: arguments of that own pool.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: RewardFunction | str | Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        *,
        pool: RewardPool | None = None,
        pool_options: dict[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.reward_fn_key = reward_fn_key
        self._compute_score = compute_score
        self._pool = pool
        self._owns_pool = pool is None
        self._pool_options = pool_options or {}

    scores_itself = False
    """Whether the manager needs no scorer of the data source."""

    @classmethod
    def prepare(cls, function: RewardFunction, reward_kwargs: Mapping[str, Any], pool: Any) -> RewardFunction:
        """What a run's pool scores with: `function` as this manager needs it. `pool`: the section `reward`."""
        return function

    @property
    def pool(self) -> RewardPool:
        if self._pool is None:
            self._pool = RewardPool(self._compute_score, **self._pool_options)
        return self._pool

    def close(self) -> None:
        """Close the pool if it is the manager's own; it is closed at exit otherwise."""
        if self._owns_pool and self._pool is not None:
            self._pool.close()
            self._pool = None

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Score a batch and wait for it.

        Returns:
            float32 [B, R] with each score on the last valid token of its response, zero elsewhere. A response without
            any valid token has no place for its score: its row is zero. With `return_dict`, `{"reward_tensor": …}`
            and what the manager adds to it.
        """
        if data.batch is not None and "rm_scores" in data.batch.keys():  # noqa: SIM118 (a TensorDict is no dict)
            return self._answer(data.batch["rm_scores"], [], return_dict)
        return self.assemble(data, self.pool.score_all(self.samples(data)), return_dict)

    # -- the two halves, for a trainer that submits samples to the pool while others are still being generated

    def samples(self, data: DataProto) -> list[RewardSample]:
        """One sample per row: what the reward function is given."""
        lengths = self._response_lengths(data).tolist()
        ids = [row[:length] for row, length in zip(data.batch["responses"].tolist(), lengths)]
        return self.samples_of(data, range(len(data)), ids)

    def samples_of(self, data: DataProto, rows: Sequence[int], responses: list[list[int]]) -> list[RewardSample]:
        """The samples of some rows whose responses, as token ids, may not be in `data` yet.

        A function of the user's own gets all other columns of a row in `extra_info`; rows need no ground truth for it.
        """
        own = not self.pool.function.is_default
        for needed in () if own else ("reward_model", self.reward_fn_key):
            _check_column(data, needed)
        columns = data.non_tensor_batch
        sources = columns.get(self.reward_fn_key, [""] * len(data))
        samples = []
        for row, text in zip(rows, decode_rows(self.tokenizer, responses)):
            given = {name: values[row] for name, values in columns.items()}
            extra = dict(given.get("extra_info") or {})
            if own:
                extra = with_columns(given, extra)
            for column, name in (("__num_turns__", "num_turns"), ("reward_scores", "rollout_reward_scores")):
                if column in given:
                    extra[name] = given[column]
            truth = given.get("reward_model")
            if not own and (not isinstance(truth, dict) or "ground_truth" not in truth):
                raise DataError(
                    f"row {row} of the batch has no reward_model.ground_truth, found {truth!r}",
                    "give every row a reward_model dict with ground_truth",
                )
            samples.append(RewardSample(str(sources[row]), text, _truth(given), extra))
        return samples

    def assemble(
        self, data: DataProto, results: list[RewardResult], return_dict: bool = False
    ) -> torch.Tensor | dict[str, Any]:
        """Turn the results of all rows, in order, into the reward tensor."""
        if len(results) != len(data):
            raise RewardError(f"{len(results)} results for a batch of {len(data)} rows")
        lengths = self._response_lengths(data)
        results = self._adjusted(results, lengths)
        responses = data.batch["responses"]
        reward_tensor = torch.zeros(responses.shape, dtype=torch.float32, device=responses.device)
        scores = torch.tensor([result.score for result in results], dtype=torch.float32, device=responses.device)
        rows = (lengths > 0).nonzero(as_tuple=True)[0]
        reward_tensor[rows, lengths[rows] - 1] = scores[rows]
        self._print_examples(data, results)
        return self._answer(reward_tensor, results, return_dict)

    def by_row(self, results: list[RewardResult], response_lengths: torch.Tensor) -> dict[str, Any]:
        """What `assemble` tells with `return_dict`, from the lengths `[B]` alone: not a tensor, but `row_scores` `[B]`."""
        results = self._adjusted(results, response_lengths)
        scores = torch.tensor([result.score for result in results], dtype=torch.float32)
        return {"row_scores": scores, **self.extra(results)}

    def adjust(self, result: RewardResult, response_length: int) -> RewardResult:
        """Hook: change a score by what the manager knows and the reward function does not.

        Args:
            result: what the reward function said (`score`, `acc`, `outcome`, `extra` …); shared, so return a changed copy:
                `dataclasses.replace(result, score=…)`.
            response_length: tokens of the response.
        """
        return result

    def extra(self, results: list[RewardResult]) -> dict[str, Any]:
        """Hook: what `return_dict` holds besides the tensor."""
        return {"reward_extra_info": extra_info_of(results), "reward_metrics": metrics(results)}

    # -- details

    def _answer(
        self, reward_tensor: torch.Tensor, results: list[RewardResult], return_dict: bool
    ) -> torch.Tensor | dict[str, Any]:
        return {"reward_tensor": reward_tensor, **self.extra(results)} if return_dict else reward_tensor

    def _adjusted(self, results: list[RewardResult], lengths: torch.Tensor) -> list[RewardResult]:
        return [self.adjust(result, int(length)) for result, length in zip(results, lengths)]

    @staticmethod
    def _response_lengths(data: DataProto) -> torch.Tensor:
        return data.batch["attention_mask"][:, data.batch["prompts"].shape[1] :].sum(dim=1)

    def _print_examples(self, data: DataProto, results: list[RewardResult]) -> None:
        if self.num_examine <= 0:
            return
        shown: Counter[str] = Counter()
        sources = data.non_tensor_batch.get(self.reward_fn_key, [""] * len(data))
        prompts, width = data.batch["prompts"], data.batch["prompts"].shape[1]
        prompt_lengths = data.batch["attention_mask"][:, :width].sum(dim=1).tolist()
        lengths = self._response_lengths(data).tolist()
        for row, result in enumerate(results):
            source = str(sources[row])
            shown[source] += 1
            if shown[source] > self.num_examine:
                continue
            prompt = self.tokenizer.decode(prompts[row, width - int(prompt_lengths[row]) :].tolist())
            response = self.tokenizer.decode(data.batch["responses"][row, : int(lengths[row])].tolist())
            truth = _truth({name: values[row] for name, values in data.non_tensor_batch.items()})
            told = f"{result.score:g} ({result.outcome})"
            print(
                f"[data source] {source}\n[prompt] {prompt}\n[response] {response}\n[ground truth] {truth}\n[score] {told}"
            )


def extra_info_of(results: list[RewardResult]) -> dict[str, list[Any]]:
    """Everything the reward function said, and why scoring failed where it did: one list of B per key; None where a row has
    nothing under that key."""
    if not results:
        return {}
    info: dict[str, list[Any]] = {"score": [r.score for r in results], "outcome": [r.outcome for r in results]}
    for name in ("acc", "pred"):
        values = [getattr(result, name) for result in results]
        if any(value is not None for value in values):
            info[name] = values
    for key in dict.fromkeys(key for result in results for key in result.extra):
        info.setdefault(key, [result.extra.get(key) for result in results])
    if any(result.failed for result in results):  # whoever reads the samples sees why
        info["error"] = [(r.error or "")[-_MAX_ERROR:] if r.failed else r.extra.get("error") for r in results]
    return info


def _truth(row: dict[str, Any]) -> Any:
    """`reward_model.ground_truth`, or else what a column `ground_truth` says."""
    told = row.get("reward_model")
    return told["ground_truth"] if isinstance(told, dict) and "ground_truth" in told else row.get("ground_truth")


def _check_column(data: DataProto, name: str) -> None:
    if name not in data.non_tensor_batch:
        raise DataError(
            f"the batch has no column {name!r}; it has: {', '.join(sorted(data.non_tensor_batch))}",
            "keep this column of the dataset in the batch, or set data.reward_fn_key",
        )


def decode_rows(tokenizer: Any, rows: list[list[int]]) -> list[str]:
    """`tokenizer.batch_decode(rows, skip_special_tokens=True)`, on all cores where the tokenizer's backend can.

    transformers decodes row by row and walks through every id in Python first: with a thousand long rows that takes as
    long as scoring them.
    """
    backend = getattr(tokenizer, "_tokenizer", None)
    decode = getattr(type(tokenizer), "_decode", None)
    is_own = getattr(decode, "__module__", "").startswith("transformers.tokenization_utils")
    if backend is None or not hasattr(backend, "decode_batch") or not is_own or tokenizer.clean_up_tokenization_spaces:
        return tokenizer.batch_decode(rows, skip_special_tokens=True)
    return backend.decode_batch(rows, skip_special_tokens=True)


_MANAGERS: dict[str, type] = {}
_Class = TypeVar("_Class", bound=type)


def register_manager(name: str) -> Callable[[_Class], _Class]:
    """Class decorator: make a manager known as `reward_model.reward_manager=<name>`."""
    name = name_of(name)

    def keep(cls: _Class) -> _Class:
        if _MANAGERS.get(name, cls) is not cls:
            raise ConfigError(f"there is a reward manager {name!r} already", "choose another name")
        _MANAGERS[name] = cls
        allow_name("reward_model.reward_manager", name)
        return cls

    return keep


def manager_class(name: str) -> type[Any]:
    """By registered name, by `"package.module:Class"` or by `"folder/file.py:Class"`."""
    name = name_of(name)
    for built_in in ("kinds", "limited"):
        importlib.import_module(f"quadriga.rewards.managers.{built_in}")
    if name in _MANAGERS:
        return _MANAGERS[name]
    place, colon, class_name = name.rpartition(":")
    if not colon:
        raise ConfigError(
            f"unknown reward manager {name!r}. Known: {', '.join(sorted(_MANAGERS))}",
            "use one of these, or name your own class as package.module:Class or folder/file.py:Class",
        )
    found = import_named(place, class_name, "reward_model.reward_manager")
    if not isinstance(found, type):
        raise ConfigError(f"there is no class {class_name!r} in {place}", "check reward_model.reward_manager")
    return found
