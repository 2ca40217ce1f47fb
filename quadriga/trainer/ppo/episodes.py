"""Episodes in a training run: which agent conducts which sample, between the stream and the pool of agents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quadriga.agents.episode import Episode
from quadriga.agents.load import BUILT_IN, SINGLE_TURN, TOOLS, AgentSpec, find_agent, plain_name, read_agents
from quadriga.agents.pool import EpisodePool, Start
from quadriga.agents.process import AgentJob
from quadriga.agents.recorder import Limits, Texts
from quadriga.config.schema import Config
from quadriga.errors import ConfigError, DataError
from quadriga.rollout.interface import Request
from quadriga.rollout.router import Router
from quadriga.rollout.service import Sample
from quadriga.trainer.ppo.groups import Group

AGENT_COLUMN = "agent_name"
"""The column of a dataset that names a row's agent, as in verl."""


class Episodes:
    """Starts the episodes of groups, and brings what came of them to the stream.

    Args:
        default: the agent of rows that name none.
        agents: those of the configuration, by name.
        job: what their processes need to know.
        open_pool: makes the pool where they run.

    Attributes:
        said: what a user should know of the chat template.
    """

    def __init__(
        self, default: str, agents: dict[str, AgentSpec], job: AgentJob, open_pool: Callable[[], EpisodePool]
    ) -> None:
        self._default, self._agents, self._texts = plain_name(default), agents, job.texts()
        self._known: dict[str, bool] = {}
        self.said = told_of_template(self._texts, job.has_tools)
        self._knows(self._default)
        self.pool = open_pool()

    @classmethod
    def of(cls, config: Config, tokenizer: Any, datasets: Sequence[Any], log_file: str | None) -> Episodes | None:
        """What a run needs, its agents imported; None if all rows are answered in a single turn."""
        options = config.actor_rollout_ref.rollout.agent
        agents = read_agents(options.agent_loop_config_path)
        default = plain_name(options.default_agent_loop)
        if default == SINGLE_TURN and not any(AGENT_COLUMN in dataset[0] for dataset in datasets if len(dataset)):
            return None
        job = job_of(config, tokenizer, default, agents)
        return cls(default, agents, job, lambda: EpisodePool(job, options, log_file=log_file))

    def connect(self, router: Router, on_episode: Callable[[tuple[str, int], Episode], None]) -> None:
        self.pool.connect(router.submit, router.abort, on_episode, router.fail)

    def agent_of(self, group: Group) -> str:
        column = group.prompts.non_tensor_batch.get(AGENT_COLUMN)
        named = None if column is None else column[group.row]
        return self._default if named is None else plain_name(str(named))

    def conducts(self, group: Group) -> bool:
        """Whether an agent asks the policy for this prompt. ConfigError for a name that is no agent's, or whose agent cannot work."""
        return self._knows(self.agent_of(group))

    def _knows(self, name: str) -> bool:
        if name not in self._known:
            self._known[name] = name != SINGLE_TURN
            if self._known[name] and find_agent(name, self._agents).target == BUILT_IN[TOOLS]:
                require_tools(self._texts)
        return self._known[name]

    def start(self, groups: Sequence[tuple[Group, list[Request]]], validates: bool) -> None:
        """Begin an episode for each sample of the groups' requests."""
        starts = []
        for group, requests in groups:
            agent, row = self.agent_of(group), row_of(group)
            prompt = row.pop("raw_prompt")
            for request in requests:
                name, _, base = request.request_id.rpartition("/")
                for k in request.sample_indices:
                    index = int(base) + k
                    task = {
                        "row": row,
                        "prompt": prompt if isinstance(prompt, str) else [dict(message) for message in prompt],
                        "uid": group.uid,
                        "sample_index": index,
                        "step": request.step,
                        "validates": validates,
                        "seed": (request.params.seed, request.step, *request.uid, index),
                    }
                    first = Request(
                        f"{name}/{index}",
                        request.prompt_ids,
                        request.params,
                        request.uid,
                        (k,),
                        request.step,
                        None,
                        request.version,
                    )
                    starts.append(Start(agent, task, first, (name, index)))
        self.pool.start(starts)

    def take_answers(self, samples: list[Sample]) -> list[Sample]:
        """Give those that episodes have asked for to them; returns the others."""
        own = [sample for sample in samples if self.pool.owns(sample.request_id)]
        if own:
            self.pool.answer(own)
        return [sample for sample in samples if not self.pool.owns(sample.request_id)] if own else samples

    def waiting_for(self) -> list[str]:
        return self.pool.waiting_for()

    def close(self) -> None:
        self.pool.close()


def told_of_template(texts: Texts, has_tools: bool) -> list[str]:
    """The roles with which a conversation cannot go on, or of which a message is not simply appended, and why; and whether the policy
    is shown its tools."""
    if not texts.has_template:
        return []
    template = texts.template
    told = [
        f"the chat template cannot go on with a message of role {r!r}: {why}" for r, why in template.refused.items()
    ]
    if rewritten := {role: why for role, why in template.offending.items() if role not in template.refused}:
        told.append(
            f"the chat template does not simply append a message of role {', '.join(rewritten)}: {next(iter(rewritten.values()))}; "
            "what the policy wrote stays as it wrote it, and only what is new is rendered"
        )
    if has_tools and not template.shows_tools:
        told.append(
            "the chat template does not show the policy its tools: tell of them in the prompts, or set data.chat_template"
        )
    return told


def require_tools(texts: Texts) -> None:
    """ConfigError where the agent `tools` cannot talk with the policy."""
    if not texts.has_template:
        raise ConfigError(
            "the agent tools talks in messages, and the tokenizer has no chat template", "set data.chat_template"
        )
    try:
        texts.template.require("tool")
    except DataError as problem:
        raise ConfigError(problem.what, problem.fix) from problem


def row_of(group: Group) -> dict[str, Any]:
    """The columns of a group's prompt as plain values."""
    columns = group.prompts.non_tensor_batch
    values = {name: column[group.row] for name, column in columns.items()}
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in values.items()}


def job_of(config: Config, tokenizer: Any, default: str, agents: dict[str, AgentSpec]) -> AgentJob:
    """What the agents' processes need of a configuration."""
    from quadriga.models.load import generation_end_tokens, model_vocabulary

    policy, data = config.actor_rollout_ref, config.data
    rollout, turns = policy.rollout, policy.rollout.multi_turn
    limits = Limits(
        rollout.prompt_length,
        rollout.response_length,
        model_vocabulary(policy.model.path, policy.model.trust_remote_code),
        turns.max_tokens_per_turn,
        turns.max_assistant_turns,
        turns.max_user_turns,
        rollout.agent.max_contexts,
    )
    return AgentJob(
        default=default,
        agents=agents,
        tokenizer=tokenizer,
        chat_template=data.chat_template,
        template_kwargs=dict(data.apply_chat_template_kwargs),
        end_token_ids=tuple(generation_end_tokens(policy.model.path, tokenizer)),
        limits=limits,
        timeout_s=rollout.agent.episode_timeout_s,
        max_threads=rollout.agent.max_concurrent,
        tool_options=dict(vars(turns)),
        memory_limit_mb=rollout.agent.memory_limit_mb,
    )
