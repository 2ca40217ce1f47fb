"""The policy of one episode, in the agent's process: contexts that grow by what is new, limits, and turns that are rewarded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from quadriga.agents.conversation import ChatTemplate, Conversation
from quadriga.agents.episode import CONTEXTS, TOKENS, TURNS
from quadriga.agents.policy import Generation, Message
from quadriga.agents.task import EpisodeOver
from quadriga.data.chat import ChatEncoder
from quadriga.errors import ConfigError, DataError, WorkerError
from quadriga.rollout.interface import SamplingParams
from quadriga.rollout.service import Sample

FREE = ("max_new_tokens", "min_new_tokens", "stop_token_ids", "stop_strings", "ignore_eos")
"""What an agent may choose for itself. The distribution is the run's: training computes log-probs of that one."""


@dataclass(frozen=True)
class Limits:
    """Of one episode."""

    prompt_length: int
    """Longest first prompt, in tokens."""
    response_length: int
    """Most tokens after a row's prompt, written and read."""
    vocabulary: int
    max_tokens_per_turn: int | None = None
    max_assistant_turns: int | None = None
    max_user_turns: int | None = None
    """Most times that the policy reads something new."""
    max_contexts: int | None = None

    def check(self, ids: Sequence[int], max_new_tokens: int) -> None:
        """DataError for a context that no engine of the run can go on with."""
        if not ids:
            raise DataError("generate was called with an empty context", "give at least one token")
        if min(ids) < 0 or max(ids) >= self.vocabulary:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise DataError(
                f"generate was called with the token id {wrong}, and the model has {self.vocabulary}",
                "give ids of the policy's own tokenizer",
            )
        if len(ids) + max_new_tokens > self.prompt_length + self.response_length:
            raise DataError(
                f"{len(ids)} tokens and {max_new_tokens} new ones are more than the engine has room for",
                "raise data.max_prompt_length or data.max_response_length",
            )


@dataclass
class _Context:
    """A context as it grows, and where its first prompt ended."""

    ids: list[int]
    prompt_tokens: int
    conversation: Conversation | None = None
    text: str | None = None
    waits: bool = False
    """For an answer: what is asked beside it does not go on from it."""


class Texts:
    """Texts, conversations and token ids for one tokenizer. The chat template is looked at when it is first needed."""

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None,
        template_kwargs: dict[str, Any],
        end_token_ids: Sequence[int],
        tool_format: str,
    ) -> None:
        self.tokenizer, self.end_token_ids = tokenizer, end_token_ids
        self._options = (chat_template, template_kwargs, tool_format)
        self._template: ChatTemplate | None = None
        self._encoder: ChatEncoder | None = None

    @property
    def encoder(self) -> ChatEncoder:
        if self._encoder is None:
            self._encoder = ChatEncoder(self.tokenizer, *self._options[:2])
        return self._encoder

    @property
    def template(self) -> ChatTemplate:
        if self._template is None:
            self._template = ChatTemplate(self.encoder, end_token_ids=self.end_token_ids, tool_format=self._options[2])
        return self._template

    @property
    def has_template(self) -> bool:
        return self._options[0] is not None or bool(getattr(self.tokenizer, "chat_template", None))

    def encode(self, text: str, first: bool) -> list[int]:
        """Ids of a text; the `first` of a context comes after the tokens that begin every text."""
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return [*self.encoder.plain_prefix(), *ids] if first else list(ids)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)


class RecordingPolicy:
    """What an agent gets as `policy`; see `quadriga.agents.policy.Policy`.

    Args:
        ask: `(call, prompt ids, sampling)`: has the engines continue it.
        resumes: told whenever code of the agent's own is about to run.
    """

    def __init__(
        self,
        texts: Texts,
        limits: Limits,
        sampling: SamplingParams,
        ask: Callable[[int, list[int], SamplingParams], Awaitable[Sample]],
        resumes: Callable[[], None],
    ) -> None:
        self._texts, self._limits, self._sampling, self._ask, self._resumes = texts, limits, sampling, ask, resumes
        self._contexts: list[_Context] = []
        self._calls = self._reads = 0
        self.answered: list[int] = []
        """The calls that were answered, in the order of their answers."""
        self.given_up = 0
        """Calls that were cancelled before their answer came, as by a client that has gone. They are no part of the episode."""
        self.rewards: dict[int, float] = {}
        """By call."""
        self.counts = {"tool_calls": 0, "tool_errors": 0}
        self.open_endpoint: Callable[[], tuple[str, str]] | None = None
        """Gives URL and key of an endpoint on which this policy answers."""

    @property
    def base_url(self) -> str:
        """Of an OpenAI-style API on which this episode's policy answers to whoever has `api_key`."""
        return self._address()[0]

    @property
    def api_key(self) -> str:
        return self._address()[1]

    @property
    def turns(self) -> int:
        """Answers that were asked for so far."""
        return self._calls

    @property
    def messages(self) -> list[Message]:
        """The conversation that went on last, as far as it is one."""
        for context in reversed(self._contexts):
            if context.conversation is not None:
                return [dict(message) for message in context.conversation.messages]
        return []

    def encode(self, text: str) -> list[int]:
        """Token ids of a text as it stands, for `stop_token_ids` or a context of ids."""
        return self._texts.encode(text, first=False)

    def reward(self, value: float) -> None:
        """Give the turn that was answered last a reward of its own; several add up."""
        if not self.answered:
            raise DataError("there is no turn yet that could be rewarded", "call policy.generate first")
        call = self.answered[-1]
        self.rewards[call] = self.rewards.get(call, 0.0) + float(value)

    def count(self, tool_calls: int = 0, tool_errors: int = 0) -> None:
        """Add to the episode's figures."""
        self.counts["tool_calls"] += int(tool_calls)
        self.counts["tool_errors"] += int(tool_errors)

    def runs(self) -> None:
        """Say that the agent's own code is about to run, so that it is known whose it was if the process ends by it."""
        self._resumes()

    async def generate(
        self,
        prompt: str | Sequence[Message] | Sequence[int],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        **sampling: Any,
    ) -> Generation:
        params = self._params(sampling)
        if self._limits.max_assistant_turns is not None and self._calls >= self._limits.max_assistant_turns:
            raise EpisodeOver(TURNS)
        context = self._context(prompt, tools)
        room = self._room(context)
        if room < 1:
            raise EpisodeOver(TOKENS)
        room = min(room, params.max_new_tokens, self._limits.max_tokens_per_turn or room)
        params = replace(params, max_new_tokens=room, min_new_tokens=min(params.min_new_tokens, room))
        asked = list(context.ids)
        self._limits.check(asked, room)
        call, self._calls = self._calls, self._calls + 1
        context.waits = True
        try:
            sample = await self._ask(call, asked, params)
        finally:
            context.waits = False
            self._resumes()
        self.answered.append(call)
        return self._generation(context, asked, sample, tools)

    # ---- inside ----

    def _address(self) -> tuple[str, str]:
        if self.open_endpoint is None:
            raise WorkerError("this policy has no endpoint", "agents of a training run have one")
        return self.open_endpoint()

    def _params(self, own: dict[str, Any]) -> SamplingParams:
        if unknown := set(own) - {f.name for f in fields(SamplingParams)}:
            raise ConfigError(
                f"generate has no option {sorted(unknown)[0]!r}", f"an agent may choose {', '.join(FREE)}"
            )
        if bad := [name for name, value in own.items() if name not in FREE and value != getattr(self._sampling, name)]:
            raise ConfigError(
                f"generate was called with {bad[0]}={own[bad[0]]!r}, and the run has {getattr(self._sampling, bad[0])!r}",
                f"set it for the run, under actor_rollout_ref.rollout; an agent may choose {', '.join(FREE)}",
            )
        return replace(self._sampling, **own)

    def _room(self, context: _Context) -> int:
        """Tokens that may still be written in this context."""
        limits = self._limits
        if len(self._contexts) == 1 and context.prompt_tokens > limits.prompt_length:
            raise DataError(
                f"the episode's first prompt has {context.prompt_tokens} tokens, and data.max_prompt_length is "
                f"{limits.prompt_length}",
                "raise data.max_prompt_length, or begin with a shorter one",
            )
        whole = limits.prompt_length + limits.response_length - len(context.ids)
        return min(whole, limits.response_length - (len(context.ids) - context.prompt_tokens))

    def _read(self) -> None:
        if self._limits.max_user_turns is not None and self._reads >= self._limits.max_user_turns:
            raise EpisodeOver(TURNS)
        self._reads += 1

    def _context(self, prompt: Any, tools: Sequence[dict[str, Any]] | None) -> _Context:
        """The context that `prompt` goes on with, extended by what is new; or a new one."""
        if isinstance(prompt, str):
            return self._text_context(prompt)
        prompt = list(prompt)
        if prompt and isinstance(prompt[0], int):
            return self._ids_context(prompt)
        for context in reversed(self._contexts):
            if context.conversation is None:
                continue
            new = context.conversation.continues(prompt, tools)
            if new:
                self._read()
                context.conversation.add(new)
                context.ids = list(context.conversation.ids)
                return context
        conversation = Conversation(self._texts.template, prompt, tools)
        ids = list(conversation.ids)
        return self._new(_Context(ids, len(ids), conversation))

    def _text_context(self, prompt: str) -> _Context:
        for context in reversed(self._contexts):
            if context.text is not None and not context.waits and prompt.startswith(context.text):
                if new := prompt[len(context.text) :]:
                    self._read()
                    context.ids = [*context.ids, *self._texts.encode(new, first=False)]
                context.text = prompt
                return context
        ids = self._texts.encode(prompt, first=True)
        return self._new(_Context(ids, len(ids), text=prompt))

    def _ids_context(self, ids: list[int]) -> _Context:
        of_ids = [c for c in self._contexts if c.conversation is None and c.text is None and not c.waits]
        before = [c for c in of_ids if ids[: len(c.ids)] == c.ids]
        if before:
            context = max(before, key=lambda c: len(c.ids))
            if len(ids) > len(context.ids):
                self._read()
            context.ids = ids
            return context
        return self._new(_Context(ids, len(ids)))

    def _new(self, context: _Context) -> _Context:
        if self._limits.max_contexts is not None and len(self._contexts) >= self._limits.max_contexts:
            raise EpisodeOver(CONTEXTS)
        self._contexts.append(context)
        return context

    def _generation(self, context: _Context, asked: list[int], sample: Sample, tools: Any) -> Generation:
        ids = sample.token_ids.tolist()
        calls: tuple[Any, ...] = ()
        text = self._texts.decode(ids)
        message: Message = {"role": "assistant", "content": text}
        if context.conversation is not None:
            message = context.conversation.add_answer(ids)
            last = context.conversation.last
            calls = last.tool_calls if last is not None else ()
            context.ids = list(context.conversation.ids)
        else:
            if self._texts.has_template:
                answer = self._texts.template.read_answer(ids, tools)
                message, calls = answer.message, answer.tool_calls
            context.ids = [*asked, *ids]
            if context.text is not None:
                context.text += text
        return Generation(
            text=text,
            prompt_ids=asked,
            token_ids=ids,
            log_probs=sample.log_probs.tolist(),
            full_log_probs=sample.full_log_probs.tolist(),
            finish_reason=sample.finish_reason,
            versions=sample.versions,
            tool_calls=calls,
            message=message,
        )
