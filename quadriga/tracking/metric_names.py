"""Every metric that a run records: what it means, in which unit, how it is printed. `docs/metrics.md` is written from here.

python -m quadriga.tracking.metric_names --write   # the page anew; a test holds it equal to this table

A part in angle brackets stands for any text: `val/<data_source>/acc/mean@<n>`. Metrics that are not listed may be
logged too; they get a plain format.
"""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

DOCS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


class Metric(NamedTuple):
    """One row of the table.

    Attributes:
        meaning: one sentence part, for the documentation.
        unit: what the number counts; "share" is between 0 and 1.
        format: format specification that prints it.
        label: its short name in the live console; empty: not shown there.
    """

    meaning: str
    unit: str
    format: str = ".4g"
    label: str = ""


def _statistics(name: str, of: str, unit: str, form: str, *, label: str = "") -> dict[str, Metric]:
    """Mean, largest and smallest of one quantity; only the mean is ever on the console."""
    words = {"mean": "mean", "max": "largest", "min": "smallest"}
    return {
        f"{name}/{which}": Metric(f"{word} {of}", unit, form, label if which == "mean" else "")
        for which, word in words.items()
    }


def _optimiser(role: str) -> dict[str, Metric]:
    return {
        f"{role}/loss": Metric("the loss that is minimised, with all its terms", "loss", ".4f"),
        f"{role}/grad_norm": Metric("norm of the gradient over all workers, before clipping", "norm", ".3g"),
        f"{role}/lr": Metric("learning rate", "per step", ".2e"),
        f"{role}/skipped": Metric("updates left out because their gradient was not finite", "share", ".1%"),
        f"{role}/nonfinite_steps": Metric("updates left out so far in this run", "updates", ",.0f"),
        f"{role}/micro_batches": Metric("micro-batches per mini-batch", "micro-batches", ".1f"),
        f"{role}/token_budget": Metric(
            "tokens that a micro-batch may hold; halved when memory runs out", "tokens", ",.0f"
        ),
    }


SCORES: dict[str, Metric] = {
    **_statistics("critic/score", "score of a row, from the reward function or model", "score", ".3f", label="reward"),
    **_statistics("critic/rewards", "reward of a row: its score, less the KL penalty where that is on", "score", ".3f"),
    **_statistics("critic/advantages", "advantage of a token", "score", ".3f"),
    **_statistics("critic/returns", "return of a token", "score", ".3f"),
    **_statistics("critic/values", "predicted value of a token, before the update", "score", ".3f"),
    "reward/correct": Metric("rows whose answer is right", "share", ".1%", "accuracy"),
    "reward/wrong": Metric("rows whose answer is wrong", "share", ".1%"),
    "reward/unparsed": Metric("rows in which no answer was found", "share", ".1%"),
    "reward/errors": Metric("rows on which the reward function crashed", "share", ".1%", "crashed"),
    "reward/timeouts": Metric("rows whose scoring was killed at reward.timeout_s", "share", ".1%", "timed out"),
    "reward/score": Metric("mean score given by the reward function", "score", ".3f"),
    "reward/seconds_mean": Metric("time to score a row", "s", ".3f"),
    "reward/seconds_max": Metric("longest time to score a row", "s", ".3f"),
    "reward/equal_groups": Metric("groups whose responses all score the same: they teach nothing", "share", ".1%"),
    "reward/length_correlation": Metric("correlation of a response's score with its length", "-1 to 1", ".2f"),
    "reward/length_mean": Metric("mean of what algorithm.length_reward added", "score", ".3f"),
    "gdpo/<key>/mean": Metric("gdpo: mean of one reward", "reward", ".3f"),
    "gdpo/<key>/std": Metric("gdpo: its standard deviation over the batch", "reward", ".3f"),
    "gdpo/<key>/groups_without_spread": Metric("gdpo: rows in whose group it is the same for all", "share", ".1%"),
    "gigpo/step_group_size": Metric("gigpo: steps that saw the same as a step, itself included", "rows", ".2f"),
    "reward/extra/<key>": Metric("mean of a number that the reward function returned beside the score", "any"),
}

POLICY: dict[str, Metric] = {
    "actor/pg_loss": Metric("policy loss", "loss", ".4f"),
    "actor/pg_clipfrac": Metric("tokens whose ratio was clipped", "share", ".2%"),
    "actor/pg_clipfrac_lower": Metric("tokens with a negative advantage held by the dual clip", "share", ".2%"),
    "actor/ppo_kl": Metric(
        "mean of old minus new log-prob: how far the step has moved the policy", "nats per token", ".5f", "kl"
    ),
    "actor/entropy_coeff": Metric("weight of the entropy bonus, where it adapts itself", "weight", ".4g"),
    "actor/opsm_dropped": Metric("tokens of rows that policy_loss.opsm_delta dropped", "share", ".2%"),
    "actor/vespo_weight": Metric("vespo: mean weight φ of a token", "weight", ".3f"),
    "actor/behaviour_weight": Metric("decoupled: mean weight to the policy that sampled", "ratio", ".3f"),
    "actor/behaviour_outside": Metric("decoupled: tokens whose weight was above the cap", "share", ".2%"),
    "actor/masked_high": Metric("prime_rl: good tokens masked because they became too likely", "share", ".2%"),
    "actor/masked_low": Metric("prime_rl: bad tokens masked because they became too unlikely", "share", ".2%"),
    "actor/k3_masked": Metric("prime_rl: KL to the policy that sampled, masked tokens' part", "nats per token", ".2e"),
    "actor/k3_kept": Metric("prime_rl: the same, kept tokens' part", "nats per token", ".2e"),
    "actor/router_aux_loss": Metric(
        "mixture of experts: unevenness of the load; the experts of a token if it is even", "loss", ".3f"
    ),
    "actor/router_entropy": Metric("mixture of experts: entropy of a router's choice", "nats per token", ".3f"),
    "actor/router_idle": Metric("mixture of experts: experts that no token of a micro-batch chose", "share", ".2%"),
    "actor/router_load_max": Metric(
        "mixture of experts: tokens of the busiest expert, as a multiple of an even share", "ratio", ".2f"
    ),
    "actor/entropy": Metric("entropy of the policy", "nats per token", ".3f", "entropy"),
    "actor/kl_loss": Metric("KL to the reference policy in the loss", "nats per token", ".5f", "kl to ref"),
    "actor/kl_coef": Metric("weight of the KL in the loss", "weight", ".4g"),
    "actor/reward_kl_penalty": Metric(
        "KL to the reference policy in the reward", "nats per token", ".5f", "kl in reward"
    ),
    "actor/reward_kl_penalty_coeff": Metric("weight of the KL in the reward", "weight", ".4g"),
    **_optimiser("actor"),
}

DISTILLATION: dict[str, Metric] = {
    "distillation/loss": Metric("mean divergence from the teacher in the loss", "nats per token", ".4f", "to teacher"),
    "distillation/abs_loss": Metric("mean of its absolute value", "nats per token", ".4f"),
    "distillation/loss_max": Metric("largest of a token", "nats", ".3f"),
    "distillation/loss_min": Metric("smallest of a token", "nats", ".3f"),
    "distillation/student_mass": Metric(
        "probability that the policy gives to the teacher's top k", "probability", ".3f"
    ),
    "distillation/teacher_mass": Metric("probability that the teacher gives to them", "probability", ".3f"),
    "distillation/overlap_ratio": Metric("tokens of the teacher's top k that are in the policy's", "share", ".1%"),
    "distillation/<teacher>/reverse_kl": Metric(
        "KL of the policy to one teacher, before the update", "nats per token", ".4f"
    ),
    "distillation/<teacher>/tokens": Metric("response tokens that this teacher judges", "share", ".1%"),
}

CRITIC: dict[str, Metric] = {
    "critic/vf_loss": Metric("value loss", "loss", ".4f", "value loss"),
    "critic/vf_clipfrac": Metric("tokens whose value was clipped", "share", ".2%"),
    "critic/vpred_mean": Metric("mean predicted value during the update", "score", ".3f"),
    "critic/vf_explained_var": Metric(
        "share of the returns' variance that the values explain, before the update; 1 is perfect", "at most 1", ".3f"
    ),
    **_optimiser("critic"),
}

LENGTHS: dict[str, Metric] = {
    **_statistics("response_length", "length of a response", "tokens", ".1f", label="length"),
    "response_length/clip_ratio": Metric("responses cut off at data.max_response_length", "share", ".1%", "cut off"),
    "response/repetitive": Metric(
        "responses that end in a loop: up to 128 tokens, three times or more", "share", ".1%"
    ),
    **_statistics("prompt_length", "length of a prompt", "tokens", ".1f"),
    "response_length/filtered": Metric("responses left out by algorithm.overlong_filter", "share", ".1%"),
    "prompt_length/clip_ratio": Metric("prompts of length data.max_prompt_length", "share", ".1%"),
}

ROLLOUT: dict[str, Metric] = {
    "rollout/logprob_diff_mean": Metric(
        "mean |log-prob of rollout − of trainer| of the sampled tokens, before the step's first update", "nats", ".2e"
    ),
    "rollout/logprob_diff_max": Metric("the same, of the token where it is largest", "nats", ".2e"),
    "rollout/prefix_reuse": Metric(
        "tokens of later calls' prompts that came from the cache, of those that the call before in the same episode had computed",
        "share",
        ".1%",
    ),
    "training/rollout_probs_diff_mean": Metric("mean |probability by rollout − by trainer|", "probability", ".2e"),
    "training/rollout_probs_diff_max": Metric("largest |probability by rollout − by trainer|", "probability", ".2e"),
    "rollout_corr/kl": Metric("KL of rollout to trainer, plain estimate; 0 is ideal", "nats per token", ".2e"),
    "rollout_corr/k3_kl": Metric(
        "KL of rollout to trainer, low-variance estimate; 0 is ideal", "nats per token", ".2e"
    ),
    "rollout_corr/chi2_token": Metric("χ² distance of rollout and trainer, by token; 0 is ideal", "1", ".2e"),
    "rollout_corr/chi2_seq": Metric("χ² distance of rollout and trainer, by sequence; 0 is ideal", "1", ".2e"),
    "rollout_corr/ess": Metric("effective sample size of the importance weights; 1 is ideal", "share", ".3f"),
    "rollout_corr/training_ppl": Metric("perplexity of the sampled tokens by the trainer", "1", ".3f"),
    "rollout_corr/rollout_ppl": Metric("perplexity of the sampled tokens by the rollout", "1", ".3f"),
    "rollout_corr/is_mean": Metric("mean importance weight trainer/rollout, before normalisation", "ratio", ".4f"),
    "rollout_corr/is_clipped_fraction": Metric("tokens whose importance weight was outside the bounds", "share", ".2%"),
    "rollout_corr/masked_fraction": Metric("tokens that the correction took out", "share", ".2%"),
    "rollout_corr/m2po_dropped": Metric("tokens that m2po_threshold dropped", "share", ".2%"),
    "rollout_corr/staleness_mean": Metric("versions that a token is behind the policy that learns", "versions", ".2f"),
    "rollout_corr/staleness_max": Metric("the same, of the oldest token", "versions", ".0f"),
    "rollout_corr/versions_in_row_max": Metric("most versions that had a hand in one row", "versions", ".0f"),
    "rollout_corr/seq_masked_fraction": Metric("rows that the correction took out entirely", "share", ".2%"),
}

VALIDATION: dict[str, Metric] = {
    "val/<data_source>/acc/mean@<n>": Metric(
        "accuracy on held-out prompts, mean over n answers to each", "share", ".1%"
    ),
    "val/<data_source>/acc/best@<n>": Metric("prompts with at least one right answer among n", "share", ".1%"),
    "val/<data_source>/acc/maj@<n>": Metric("prompts whose most frequent answer among n is right", "share", ".1%"),
    "val/<data_source>/score/mean@<n>": Metric(
        "score on held-out prompts, mean over n answers to each", "score", ".3f"
    ),
    "val/<data_source>/score/best@<n>": Metric("best score among n answers to a held-out prompt, mean", "score", ".3f"),
    "val/<data_source>/score/maj@<n>": Metric("score of the most frequent answer among n, mean", "score", ".3f"),
    "val/<data_source>/unparsed": Metric("held-out answers in which no answer was found", "share", ".1%"),
    "val/<data_source>/response_length/mean": Metric("mean length of a held-out answer", "tokens", ".1f"),
}

TIMING: dict[str, Metric] = {
    "timing_s/gen": Metric("generation", "s", ".2f", "gen"),
    "timing_s/reward": Metric("waiting for scores after generation has ended", "s", ".2f", "reward"),
    "timing_s/old_log_prob": Metric(
        "log-probs by the actor before the update; absent when strictly on-policy", "s", ".2f", "old log-prob"
    ),
    "timing_s/ref": Metric("log-probs by the reference policy", "s", ".2f", "ref"),
    "timing_s/teacher": Metric("log-probs by the teachers", "s", ".2f", "teacher"),
    "timing_s/values": Metric("values by the critic", "s", ".2f", "values"),
    "timing_s/adv": Metric("advantages", "s", ".2f", "advantages"),
    "timing_s/update_critic": Metric("update of the critic", "s", ".2f", "update critic"),
    "timing_s/update_actor": Metric("update of the actor", "s", ".2f", "update actor"),
    "timing_s/update_weights": Metric("new weights to the rollout engine", "s", ".2f", "weights"),
    "timing_s/testing": Metric("validation", "s", ".2f", "validation"),
    "timing_s/save_checkpoint": Metric(
        "waiting for a checkpoint to be copied to host memory; it is written while training goes on",
        "s",
        ".2f",
        "checkpoint",
    ),
    "timing_s/step": Metric("the step: all of the above but validation and checkpoints", "s", ".2f"),
}

MEMORY: dict[str, Metric] = {
    "memory/host_gb/driver": Metric(
        "resident memory of the process that steers the run, at the end of the step", "GiB", ".2f"
    ),
    "memory/host_gb/<phase>": Metric("most resident memory of a worker process in a phase", "GiB", ".2f"),
    "memory/device_gb/<phase>": Metric(
        "most memory that a worker's tensors took on its device in a phase", "GiB", ".2f"
    ),
}

PROGRESS: dict[str, Metric] = {
    "perf/throughput": Metric(
        "prompt and response tokens of the step per second and worker (GPU, or process on a CPU)", "tokens/s", ",.0f"
    ),
    "perf/total_throughput": Metric(
        "prompt and response tokens of the step per second, over all workers", "tokens/s", ",.0f", "tokens/s"
    ),
    "perf/total_num_tokens": Metric("prompt and response tokens of the step", "tokens", ",.0f"),
    "perf/time_per_step": Metric("time of the step", "s", ".2f"),
    "perf/max_memory_gb": Metric("largest resident memory of the process that steers the run, so far", "GiB", ".2f"),
    "training/global_step": Metric("number of the step; 0 is the validation before training", "steps", ",.0f"),
    "training/num_gen_batches": Metric(
        "batches generated for the step, with algorithm.filter_groups", "batches", ".0f"
    ),
    "training/groups_dropped": Metric(
        "groups generated for the step that it did not train on, with algorithm.filter_groups", "groups", ",.0f"
    ),
    "stream/staleness/mean": Metric(
        "versions between the weights that wrote a token and those it trains", "steps", ".2f"
    ),
    "stream/staleness/max": Metric("the same, of the oldest token", "steps", ".0f"),
    "stream/groups_ready": Metric("groups that were generated and scored ahead of training", "groups", ",.0f"),
    "stream/samples_running": Metric("samples that engines are at when the step begins to train", "samples", ",.0f"),
    "stream/samples_waiting": Metric("samples that no engine has taken up yet", "samples", ",.0f"),
    "stream/engines_busy_s": Metric("engine time spent generating since the last step, over all engines", "s", ".2f"),
    "stream/engines_idle_s": Metric("engine time with nothing to generate since the last step", "s", ".2f"),
    **_statistics("episode/turns", "answers of the policy in an episode", "turns", ".2f", label="turns"),
    "episode/contexts/mean": Metric(
        "mean contexts of an episode; more than one where agents rewrite what stood before", "contexts", ".2f"
    ),
    "episode/contexts/max": Metric("most contexts of an episode", "contexts", ".0f"),
    "episode/tool_calls/mean": Metric("tool calls of an episode", "calls", ".2f"),
    "episode/tool_errors/mean": Metric("of them, those that failed or could not be read", "calls", ".2f"),
    "episode/written_tokens/mean": Metric("tokens that the policy wrote in an episode", "tokens", ".1f"),
    "episode/read_tokens/mean": Metric(
        "tokens that it read after the first prompt: observations, answers of tools", "tokens", ".1f"
    ),
    "episode/agent_s/mean": Metric("an agent's own time in an episode, without what the policy took", "s", ".3f"),
    "episode/again": Metric(
        "episodes of the step that were run again because their agent's process ended", "runs", ",.0f"
    ),
    "episode/leaked_tasks": Metric("tasks that agents left running at the end of their episodes", "tasks", ",.0f"),
    "episode/given_up": Metric(
        "calls of the policy that were cancelled before their answer came, as by a client that has gone",
        "calls",
        ",.0f",
    ),
    "episode/failed": Metric("episodes whose agent raised, ended its process or blocked it", "share", ".1%"),
    "episode/finish/<reason>": Metric(
        "episodes by how they ended: done; turns, tokens, time, contexts: a limit; error, crashed, stuck: failures",
        "share",
        ".1%",
    ),
    "training/pf_ppo_distinct": Metric("PF-PPO: different rows among those drawn", "share", ".1%"),
    "training/restarts": Metric("times that this process has replaced dead workers so far", "restarts", ".0f"),
    "training/samples_generated_again": Metric(
        "samples so far that a new rollout engine generated in place of one that died", "samples", ",.0f"
    ),
    "training/epoch": Metric("passes over the training set completed before this step", "epochs", ".0f"),
}

ALARMS: dict[str, Metric] = {
    "alarm/<name>": Metric("1 while a detector sees this kind of trouble; absent otherwise", "1", ".0f"),
}

SUPERVISED: dict[str, Metric] = {
    "train/loss": Metric(
        "the loss: of sft, mean negative log-prob of the tokens learnt from; of rm and dpo, mean loss of a pair",
        "nats per token or pair",
        ".4f",
        "loss",
    ),
    "val/loss": Metric("the same on held-out rows", "nats per token or pair", ".4f", "held-out loss"),
    **{
        name.replace("<set>", which): metric
        for which, on, held_out in (("train", "pairs of the step", ""), ("val", "held-out pairs", "held-out "))
        for name, metric in {
            "<set>/accuracy": Metric(
                f"rm, dpo: {on} in which the chosen answer has the higher reward", "share", ".1%", f"{held_out}accuracy"
            ),
            "<set>/margin": Metric(
                f"rm, dpo: mean reward of chosen less rejected, {on}", "reward", ".3f", f"{held_out}margin"
            ),
            "<set>/chosen_reward": Metric(f"rm, dpo: mean reward of the chosen answer, {on}", "reward", ".3f"),
            "<set>/rejected_reward": Metric(f"rm, dpo: mean reward of the rejected answer, {on}", "reward", ".3f"),
        }.items()
    },
    "train/grad_norm": Metric("norm of the gradient over all workers, before clipping", "norm", ".3g", "grad norm"),
    "train/lr": Metric("learning rate", "per step", ".2e", "lr"),
    "train/skipped": Metric("updates left out because their gradient was not finite", "share", ".1%"),
    "train/epoch": Metric("passes over the training set completed before this step", "epochs", ".0f"),
    "train/time_s": Metric("time of the step", "s", ".2f"),
    "train/tokens_per_s": Metric("tokens of the step per second, over all processes", "tokens/s", ",.0f", "tokens/s"),
}

SECTIONS: dict[str, dict[str, Metric]] = {
    "Scores and rewards": SCORES,
    "Policy": POLICY,
    "Distillation": DISTILLATION,
    "Critic": CRITIC,
    "Lengths": LENGTHS,
    "Rollout against trainer": ROLLOUT,
    "Validation": VALIDATION,
    "Time": TIMING,
    "Memory": MEMORY,
    "Progress and speed": PROGRESS,
    "Alarms": ALARMS,
    "Supervised training (sft, rm, dpo)": SUPERVISED,
}

METRICS: dict[str, Metric] = {name: metric for section in SECTIONS.values() for name, metric in section.items()}

_OTHER = Metric("a metric of your own", "any")


@lru_cache(maxsize=4096)
def describe(name: str) -> Metric:
    """The table's row for a recorded name, placeholders included; a plain one for names that are not listed."""
    if name in METRICS:
        return METRICS[name]
    for pattern, metric in METRICS.items():
        if "<" in pattern and _matches(pattern, name):
            return metric
    return _OTHER


@lru_cache(maxsize=4096)
def section_of(name: str) -> str:
    """Title of the section that lists this name; "Your own" for one that none lists."""
    metric = describe(name)
    return next((title for title, section in SECTIONS.items() if metric in section.values()), "Your own")


def is_known(name: str) -> bool:
    """Whether the table lists this name."""
    return describe(name) is not _OTHER


def format_value(name: str, value: float | None) -> str:
    """The value as the table says, "–" for one that was not finite."""
    return "–" if value is None else format(value, describe(name).format)


def _matches(pattern: str, name: str) -> bool:
    parts = [".+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", pattern)]
    return re.fullmatch("".join(parts), name) is not None


INTRODUCTION = """\
# Metrics

Every step adds one line to `metrics.jsonl` in the run directory: `{"step": …, "time": …, "<metric>": …}`. `time` is in
seconds since 1970; step 0 is the validation before training. A value that was not a finite number is `null`, with a
warning in the console. The same names go to every sink of `trainer.logger`. Your own metrics may have any name.

A *row* is one response to a prompt. A *share* is between 0 and 1. Unless a row says otherwise, a value is over all rows
or response tokens of the step, whatever worker had them, and averaged over the step's updates where there are several.

This page is written from `quadriga/tracking/metric_names.py` by `python -m quadriga.tracking.metric_names --write`.
"""


def render_page() -> str:
    """The whole of docs/metrics.md."""
    lines = [INTRODUCTION]
    for title, section in SECTIONS.items():
        lines += [f"## {title}", "", "| name | meaning | unit |", "|---|---|---|"]
        lines += [f"| `{name}` | {metric.meaning} | {metric.unit} |" for name, metric in section.items()]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        DOCS_PAGE.write_text(render_page(), encoding="utf-8")
    else:
        sys.stdout.write(render_page())
