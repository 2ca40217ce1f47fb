"""The part of the schema about generation: engines, sampling, episodes of many turns. See `schema.py`."""

# ruff: noqa: RUF009  (key and section return dataclass fields, which is what a dataclass default must be)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quadriga.config.fields import (
    LARGEST_SEED,
    LONGEST,
    LONGEST_S,
    MOST_PROCESSES,
    MOST_ROWS,
    SHORTEST_S,
    key,
    section,
)
from quadriga.config.schema_models import ACTOR, BY_LOG_PROB_TOKENS, ON_A_DEVICE, budget_of_a_pass, log_prob_rows


def _temperature(default: float) -> Any:
    doc = "sampling temperature"
    return key(default, doc, at_least=0, at_most=100, only_if=".do_sample=True", zero_is_off=True)


def _top_p() -> Any:
    return key(1.0, "nucleus", at_least=1e-6, at_most=1, only_if=".do_sample=True")


def _top_k() -> Any:
    doc = "keep the k likeliest tokens; -1: all"
    return key(-1, doc, at_least=-1, at_most=LONGEST, only_if=".do_sample=True", zero_is_off=True)


@dataclass
class ValKwargsConfig:
    n: int = key(1, "responses per validation prompt", unit="rows", at_least=1, at_most=MOST_ROWS)
    do_sample: bool = key(False, "sample; False: greedy")
    temperature: float = _temperature(0.0)
    top_p: float = _top_p()
    top_k: int = _top_k()


@dataclass
class EngineKwargsConfig:
    vllm: dict[str, Any] = key(
        {}, "more arguments of vLLM's engine, e.g. block_size", only_if="actor_rollout_ref.rollout.name=vllm"
    )


@dataclass
class MultiTurnConfig:
    max_assistant_turns: int | None = key(
        None, "most answers of the policy in an episode; null: no limit", unit="turns", at_least=1
    )
    max_user_turns: int | None = key(
        None, "most times that it reads an observation or a tool's answer; null: no limit", unit="turns", at_least=0
    )
    max_tokens_per_turn: int | None = key(
        None, "most tokens of one answer of the policy; null: what is left of the response", unit="tokens", at_least=1
    )
    max_parallel_calls: int = key(1, "most tool calls of one answer that are made", unit="calls", at_least=1)
    max_tool_response_length: int = key(
        256, "longest answer of a tool that the policy reads", unit="characters", at_least=1
    )
    tool_response_truncate_side: str = key("middle", "where a longer one is cut", choices=("left", "right", "middle"))
    format: str = key("hermes", "how the policy writes tool calls", own="module:function")
    tools: list[str] = key([], "tools: calculator, python (the sandbox), or your own as file.py:name")
    tool_rewards: bool = key(True, "add what tools give to the reward; False: it is told, and nobody learns from it")
    tool_timeout_s: float = key(
        30.0, "a tool call is killed after so long", unit="s", at_least=SHORTEST_S, at_most=LONGEST_S
    )
    tool_config_path: str | None = key(None, "YAML file of tools, as in verl; null: none")
    function_tool_path: str | None = key(None, "Python file whose functions are tools, as in verl; null: none")


@dataclass
class AgentConfig:
    num_workers: int = key(2, "processes that run agents", unit="processes", at_least=1, at_most=MOST_PROCESSES)
    default_agent_loop: str = key(
        "single_turn",
        "agent of rows without a column agent_name: single_turn, tools, a name of agent_loop_config_path, or file.py:name",
    )
    agent_loop_config_path: str | None = key(
        None, "YAML file of agents, a list of {name, _target_, arguments}, as in verl; null: none"
    )
    max_contexts: int = key(
        64,
        "most contexts of an episode: conversations that do not go on with what was read and written before, each a row",
        unit="contexts",
        at_least=1,
    )
    max_concurrent: int = key(256, "most episodes at the same time in one process", unit="episodes", at_least=1)
    episode_timeout_s: float = key(
        300.0,
        "an agent's own time in an episode, without what the policy takes",
        unit="s",
        at_least=SHORTEST_S,
        at_most=LONGEST_S,
    )
    stall_s: float = key(
        60.0,
        "a process whose event loop stands still for so long is replaced",
        unit="s",
        at_least=1.0,
        at_most=LONGEST_S,
    )
    memory_limit_mb: int | None = key(
        None, "memory of one of these processes, children included; null: no limit", unit="MB", at_least=64
    )


@dataclass
class RolloutConfig:
    name: str = key(
        "native",
        "generation engine: native generates with the training module itself; vllm is vLLM, which must be installed",
        choices=("native", "vllm"),
    )
    n: int = key(1, "responses per prompt", unit="rows", at_least=1, at_most=MOST_ROWS)
    temperature: float = _temperature(1.0)
    top_p: float = _top_p()
    top_k: int = _top_k()
    do_sample: bool = key(True, "sample; False: greedy")
    seed: int = key(1, "seed of sampling", at_least=0, at_most=LARGEST_SEED)
    ignore_eos: bool = key(False, "generate to the full length")
    prompt_length: int = key("${data.max_prompt_length}", "longest prompt", unit="tokens", at_least=1)
    response_length: int = key("${data.max_response_length}", "most new tokens", unit="tokens", at_least=1)
    tensor_model_parallel_size: int = key(
        1, "neighbouring slots of a node that hold one copy of the model together to generate", unit="slots", at_least=1
    )
    max_num_seqs: int = key(256, "sequences decoded together", unit="rows", at_least=1, at_most=MOST_ROWS)
    max_num_batched_tokens: int = key(
        8192, "prompt tokens processed together", unit="tokens", at_least=1, at_most=LONGEST
    )
    gpu_memory_utilization: float = key(
        0.5,
        "share of the device memory for the engine",
        at_least=1e-3,
        at_most=1,
        only_if=f"{ON_A_DEVICE} or .name=vllm",
    )
    free_cache_engine: bool = key(
        True, "give the engine's memory back during the update", only_if=f"{ON_A_DEVICE} or .name=vllm"
    )
    enforce_eager: bool = key(False, "no CUDA graphs", only_if=f"{ON_A_DEVICE} or .name=vllm")
    enable_prefix_caching: bool = key(
        True, "a prompt that begins with tokens still in the cache computes only the rest"
    )
    max_model_len: int | None = key(
        None,
        "longest prompt and response; null: prompt_length + response_length",
        unit="tokens",
        at_least=1,
        at_most=LONGEST,
        only_if=".name=vllm",
    )
    enable_chunked_prefill: bool = key(
        True, "long prompts in several steps, as the native engine always does", only_if=".name=vllm"
    )
    engine_kwargs: EngineKwargsConfig = section(EngineKwargsConfig, "arguments of other engines")
    log_prob_micro_batch_size_per_gpu: int | None = log_prob_rows("rows per forward pass for old log-probs")
    log_prob_use_dynamic_bsz: bool | None = key(f"${{{ACTOR}.use_dynamic_bsz}}", "see actor.use_dynamic_bsz")
    log_prob_max_token_len_per_gpu: int | str = budget_of_a_pass(BY_LOG_PROB_TOKENS)
    val_kwargs: ValKwargsConfig = section(ValKwargsConfig, "sampling in validation")
    multi_turn: MultiTurnConfig = section(MultiTurnConfig, "episodes of many turns")
    agent: AgentConfig = section(AgentConfig, "who conducts an episode")
