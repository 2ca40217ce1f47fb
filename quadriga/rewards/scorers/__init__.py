"""Scorers: what an answer is worth. One file per kind of task; this file says which one a data source uses.

The table is data (`"package.module:function"` strings), so that the driver can check a data source without importing
the scorer and its libraries. Every scorer has the signature of a reward function

    (data_source, solution_str, ground_truth, extra_info=None, **options) -> dict

and returns `score` (float), `acc` (1.0 right, 0.0 wrong), `pred` (the answer found in the text, or None) and
`parsed` (False: there was no answer to judge). Further numbers become metrics.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from quadriga.errors import ConfigError, RewardError

_HERE = "quadriga.rewards.scorers."

# scorer -> (target, data sources, in lower case). The first source is the scorer's own name; `name/*` stands for a family.
_BUILT_IN: dict[str, tuple[str, tuple[str, ...]]] = {
    "gsm8k": (
        _HERE + "gsm8k:score",
        (
            "gsm8k",
            "openai/gsm8k",
            "openai/grade-school-math",
            "svamp",
            "chilled/svamp",
            "gsm-hard",
            "reasoning-machines/gsm-hard",
        ),
    ),
    "math": (
        _HERE + "math:score",
        (
            "math",
            "lighteval/math",
            "digitallearninggmbh/math-lighteval",
            "huggingfaceh4/math-500",
            "math-500",
            "math500",
            "hendrycks/competition_math",
            "hendrycks_math",
            "eleutherai/hendrycks_math",
            "nlile/hendrycks-math-benchmark",
            "math_dapo",
            "bytedtsinghua-sia/dapo-math-17k",
            "deepmath",
            "zwhe99/deepmath-103k",
            "aime",
            "aime24",
            "aime25",
            "aime_2024",
            "aime_2025",
            "huggingfaceh4/aime_2024",
            "maxwell-jia/aime_2024",
            "math-ai/aime24",
            "math-ai/aime25",
            "opencompass/aime2025",
            "math-ai/amc23",
            "amc23",
            "math-ai/minervamath",
            "minerva_math",
            "hothan/olympiadbench",
            "olympiadbench",
            "ai-mo/numinamath-cot",
            "numina_amc_aime",
            "numina_aops_forum",
            "numina_cn_k12",
            "numina_olympiads",
            "numina_synthetic_amc",
            "numina_synthetic_math",
            "open-r1/openr1-math-220k",
        ),
    ),
    "countdown": (_HERE + "countdown:score", ("countdown", "jiayi-pan/countdown-tasks-3to4", "quadriga/countdown")),
    "arithmetic": (_HERE + "arithmetic:score", ("arithmetic", "quadriga/arithmetic")),
    "reasoning_gym": (_HERE + "reasoning_gym:score", ("reasoning_gym/*",)),
    "exact": (_HERE + "match:score_exact", ("exact", "exact_match")),
    "regex": (_HERE + "match:score_regex", ("regex", "regex_match")),
    "code": (
        _HERE + "code:score",
        (
            "code",
            "mbpp",
            "google-research-datasets/mbpp",
            "humaneval",
            "openai_humaneval",
            "openai/openai_humaneval",
            "apps",
            "codeparrot/apps",
            "codecontests",
            "deepmind/code_contests",
            "codeforces",
            "taco",
            "baai/taco",
        ),
    ),
}

_targets: dict[str, str] = {source: target for target, sources in _BUILT_IN.values() for source in sources}


def register_scorer(data_source: str, target: str) -> None:
    """Score rows of `data_source` with `target`, a `"package.module:function"`; the module is imported in workers only."""
    if ":" not in target:
        raise ConfigError(
            f"scorer target {target!r} of data source {data_source!r} is not of the form package.module:function",
            "name the module and the function with a colon between them",
        )
    _targets[data_source.lower()] = target


def registered_targets() -> dict[str, str]:
    """data source (lower case) -> target, everything known in this process."""
    return dict(_targets)


def known_sources() -> list[str]:
    return sorted(_targets)


def target_of(data_source: str, targets: Mapping[str, str] | None = None) -> str:
    """The target that scores `data_source` (upper and lower case are the same); RewardError lists the known ones."""
    known = _targets if targets is None else targets
    source = str(data_source).lower()
    target = known.get(source, known.get(f"{source.partition('/')[0]}/*"))
    if target is None:
        raise RewardError(
            f"no scorer for data source {data_source!r}. Known: {', '.join(sorted(known))}",
            "set data_source to one of these, register a scorer for it with quadriga.rewards.register_scorer, "
            "or give your own function with custom_reward_function.path",
        )
    return target


def modules_for(data_sources: Iterable[str], targets: Mapping[str, str] | None = None) -> list[str]:
    """The modules that score these sources; a pool imports them once, before it forks its workers."""
    return sorted({target_of(source, targets).partition(":")[0] for source in data_sources})


def check_machine(data_sources: Iterable[str], options: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Whether what scores these sources can work on this machine: before anything expensive; ConfigError if not."""
    code = _BUILT_IN["code"][0]
    wanted = (options or {}).get("code", {}).get("require_isolation", True)
    if code in [target_of(source) for source in data_sources] and wanted:
        importlib.import_module(code.partition(":")[0]).check_machine()


@lru_cache(maxsize=256)
def _load(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def check_options(options: Mapping[str, Mapping[str, Any]]) -> None:
    """Options are given per built-in scorer, e.g. `{"gsm8k": {"method": "flexible"}}`; an unknown one is an error."""
    for scorer, given in options.items():
        if scorer not in _BUILT_IN:
            raise ConfigError(
                f"unknown scorer {scorer!r} in the scorer options", f"known: {', '.join(sorted(_BUILT_IN))}"
            )
        parameters = inspect.signature(_load(_BUILT_IN[scorer][0])).parameters
        allowed = [n for n, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY]
        for option in given:
            if option not in allowed:
                raise ConfigError(
                    f"scorer {scorer!r} has no option {option!r}", f"its options: {', '.join(allowed) or 'none'}"
                )


def score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    targets: Mapping[str, str] | None = None,
) -> Any:
    """Score one answer with the scorer of its data source: the default reward function.

    Args:
        options: options per built-in scorer, see `check_options`.
        targets: data source -> target; the table of this process when not given.
    """
    target = target_of(data_source, targets)
    given = _options_of(target, options) if options else {}
    return _load(target)(data_source, solution_str, ground_truth, extra_info, **given)


def _options_of(target: str, options: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    for scorer, given in options.items():
        if _BUILT_IN[scorer][0] == target:
            return given
    return {}
