"""`verl.utils.reward_score` and the modules below it: verl's calls and results over the scorers of `quadriga.rewards`.

Each class holds the names of the module of the same name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from quadriga.errors import RewardError
from quadriga.rewards.scorers import known_sources, score
from quadriga.rewards.scorers.extract import last_boxed
from quadriga.rewards.scorers.math import is_equivalent

__all__ = ["default_compute_score"]

SIGNED_SOURCES = ("math_dapo", "math", "math_dapo_reasoning")
"""Sources, besides `aime*`, that verl scores with 1 or −1."""


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, **kwargs: Any
) -> float | dict[str, Any]:
    """The score of the scorer that Quadriga has for a data source; a dict where verl gives one.

    Raises:
        NotImplementedError: there is no scorer for this source.
    """
    if data_source in SIGNED_SOURCES or data_source.startswith("aime"):
        return math_dapo.compute_score(solution_str, ground_truth)
    return float(_scored(data_source, solution_str, ground_truth, extra_info)["score"])


_default_compute_score = default_compute_score


def _scored(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    try:
        result = score(data_source, solution_str, ground_truth, dict(extra_info or {}))
    except RewardError as error:
        if "no scorer for" in str(error) or data_source.lower() not in known_sources():
            raise NotImplementedError(f"no reward function for {data_source!r}: {error}") from None
        raise
    return result if isinstance(result, dict) else {"score": float(result)}


class math_reward:
    """Answers in a box, compared as mathematics."""

    @staticmethod
    def compute_score(solution_str: str, ground_truth: str) -> float:
        """1.0 if the last boxed answer says the same as the truth, 0.0 otherwise."""
        return float(_scored("lighteval/MATH", solution_str, ground_truth)["score"])

    @staticmethod
    def is_equiv(str1: str | None, str2: str | None, verbose: bool = False) -> bool:
        if str1 is None or str2 is None:
            return str1 is str2
        return is_equivalent(str2, str1)

    @staticmethod
    def last_boxed_only_string(string: str) -> str | None:
        """The last box with its `\\boxed{…}`; None without one."""
        inner = last_boxed(string)
        return None if inner is None else f"\\boxed{{{inner}}}"

    @staticmethod
    def remove_boxed(s: str) -> str:
        """What the box holds.

        Raises:
            AssertionError: `s` is no box.
        """
        inner = last_boxed(s)
        if inner is None:
            raise AssertionError(f"{s!r} is no boxed answer")
        return inner


class math_batch:
    """Whole batches of such answers."""

    @staticmethod
    def compute_score_batched(
        data_sources: Sequence[str], solution_strs: Sequence[str], ground_truths: Sequence[str], extra_infos: Any
    ) -> list[float]:
        return [math_reward.compute_score(text, truth) for text, truth in zip(solution_strs, ground_truths)]


class math_verify:
    """The same comparison under the names of another module."""

    @staticmethod
    def compute_score(model_output: str, ground_truth: str, timeout_score: float = 0) -> float:
        return math_reward.compute_score(model_output, ground_truth)


class math_dapo:
    """Answers after `Answer:`, scored 1 or −1: the penalty for overlong responses is measured by that."""

    @staticmethod
    def compute_score(
        solution_str: str, ground_truth: str, strict_box_verify: bool = False, pause_tokens_index: Any = None
    ) -> dict[str, Any]:
        if strict_box_verify and last_boxed(solution_str) is None:
            return {"score": -1.0, "acc": False, "pred": None}
        result = _scored("math_dapo", solution_str, ground_truth)
        right = bool(result.get("acc", result["score"] > 0))
        return {"score": 1.0 if right else -1.0, "acc": right, "pred": result.get("pred")}

    @staticmethod
    def verify(
        solution_str: str, answer: str, strict_box_verify: bool = False, pause_tokens_index: Any = None
    ) -> tuple[bool, str | None]:
        """(whether it is right, the answer that was found)."""
        result = math_dapo.compute_score(solution_str, answer, strict_box_verify)
        return result["acc"], result["pred"]

    last_boxed_only_string = math_reward.last_boxed_only_string
    remove_boxed = math_reward.remove_boxed


class geo3k:
    """Thoughts between tags and an answer in a box: the answer counts 0.9, the form 0.1."""

    @staticmethod
    def format_reward(predict_str: str) -> float:
        return float(re.fullmatch(r"<think>.*</think>.*\\boxed\{.*\}.*", predict_str, re.DOTALL) is not None)

    @staticmethod
    def acc_reward(predict_str: str, ground_truth: str, use_boxed: bool = True) -> float:
        answer = last_boxed(predict_str) if use_boxed else predict_str
        return float(answer is not None and is_equivalent(ground_truth, answer))

    @staticmethod
    def compute_score(predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1) -> float:
        right, formed = geo3k.acc_reward(predict_str, ground_truth, use_boxed), geo3k.format_reward(predict_str)
        return (1 - format_score) * right + format_score * formed


class search_r1_like_qa_em:
    """The text between the last `<answer>` tags, compared with any of several right ones."""

    @staticmethod
    def extract_solution(solution_str: str) -> str | None:
        found = re.findall(r"<answer>(.*?)</answer>", solution_str, re.DOTALL)
        return found[-1].strip() if found else None

    @staticmethod
    def normalize_answer(s: str) -> str:
        """Lower case, without punctuation and articles, single spaces."""
        plain = re.sub(r"[^\w\s]|_", "", s.lower())
        return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())

    @staticmethod
    def em_check(prediction: str, golden_answers: str | Sequence[str]) -> float:
        answers = [golden_answers] if isinstance(golden_answers, str) else golden_answers
        plain = search_r1_like_qa_em.normalize_answer
        return float(any(plain(answer) == plain(prediction) for answer in answers))

    @staticmethod
    def compute_score(
        solution_str: str,
        ground_truth: Mapping[str, Any],
        method: str = "strict",
        format_score: float = 0.0,
        score: float = 1.0,
    ) -> float:
        answer = search_r1_like_qa_em.extract_solution(solution_str)
        if answer is None:
            return 0.0
        return score if search_r1_like_qa_em.em_check(answer, ground_truth["target"]) else format_score


class prime_math:
    """Mathematics, with what was found in the text."""

    @staticmethod
    def compute_score(model_output: str, ground_truth: str) -> tuple[bool, bool, str]:
        """(right, an answer was found, the answer)."""
        result = _scored("math", model_output, ground_truth)
        return bool(result["acc"]), bool(result["parsed"]), str(result["pred"] or "")


class prime_code:
    """Programs, run against test cases."""

    @staticmethod
    def compute_score(completion: str, test_cases: Any, continuous: bool = False) -> tuple[float, list[dict[str, Any]]]:
        """(share of the tests that pass, or with `continuous` false whether all do; what there is to tell)."""
        result = _scored("apps", completion, test_cases)
        passed = float(result["score"])
        return (passed if continuous else float(passed >= 1)), [result]
