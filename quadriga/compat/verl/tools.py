"""`verl.tools`: tools of users' own, as classes with state or as functions, and the schemas that they are described by."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

from quadriga.agents.tools import BaseTool as _BaseTool
from quadriga.agents.tools import ToolResponse, function_tool
from quadriga.compat.verl.utilities import rollout_trace_op

__all__ = [
    "BaseTool",
    "Gsm8kTool",
    "OpenAIFunctionCallSchema",
    "OpenAIFunctionParametersSchema",
    "OpenAIFunctionParsedSchema",
    "OpenAIFunctionPropertySchema",
    "OpenAIFunctionSchema",
    "OpenAIFunctionToolCall",
    "OpenAIFunctionToolSchema",
    "SandboxFusionTool",
    "ToolResponse",
    "function_tool",
    "rollout_trace_op",
]


class _Schema:
    """A description with known parts; `model_validate` makes it from plain values, `model_dump` gives them back."""

    parts: ClassVar[dict[str, Any]] = {}
    """Name → what it is if it is left out; `...` if it must be there."""
    inner: ClassVar[dict[str, type[_Schema]]] = {}
    """Parts that are descriptions themselves, or mappings of such."""

    def __init__(self, **given: Any) -> None:
        if lacking := [name for name, default in self.parts.items() if default is ... and name not in given]:
            raise ValueError(f"{type(self).__name__} lacks {', '.join(lacking)}")
        self._given = {name for name in given if given[name] is not None}
        for name, default in self.parts.items():
            setattr(self, name, self._part(name, given.get(name, None if default is ... else default)))

    def _part(self, name: str, value: Any) -> Any:
        kind = self.inner.get(name)
        if kind is None or value is None or isinstance(value, _Schema):
            return value
        if name == "properties":
            return {key: v if isinstance(v, _Schema) else kind(**v) for key, v in value.items()}
        return kind(**value)

    @classmethod
    def model_validate(cls, obj: Mapping[str, Any]) -> Any:
        return obj if isinstance(obj, cls) else cls(**obj)

    def model_dump(self, *, exclude_none: bool = False, exclude_unset: bool = False, **kwargs: Any) -> dict[str, Any]:
        options = {"exclude_none": exclude_none, "exclude_unset": exclude_unset}

        def plain(value: Any) -> Any:
            if isinstance(value, _Schema):
                return value.model_dump(**options)
            return {k: plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value

        left_out = {name for name in self.parts if exclude_unset and name not in self._given}
        told = {name: plain(getattr(self, name)) for name in self.parts if name not in left_out}
        return {name: value for name, value in told.items() if not (exclude_none and value is None)}


class OpenAIFunctionPropertySchema(_Schema):
    parts: ClassVar[dict[str, Any]] = {"type": ..., "description": None, "enum": None}


class OpenAIFunctionParametersSchema(_Schema):
    parts: ClassVar[dict[str, Any]] = {"type": "object", "properties": {}, "required": []}
    inner: ClassVar[dict[str, type[_Schema]]] = {"properties": OpenAIFunctionPropertySchema}


class OpenAIFunctionSchema(_Schema):
    parts: ClassVar[dict[str, Any]] = {"name": ..., "description": "", "parameters": None, "strict": False}
    inner: ClassVar[dict[str, type[_Schema]]] = {"parameters": OpenAIFunctionParametersSchema}


class OpenAIFunctionToolSchema(_Schema):
    parts: ClassVar[dict[str, Any]] = {"type": "function", "function": ...}
    inner: ClassVar[dict[str, type[_Schema]]] = {"function": OpenAIFunctionSchema}


class OpenAIFunctionParsedSchema(_Schema):
    parts: ClassVar[dict[str, Any]] = {"name": ..., "arguments": "{}"}


class OpenAIFunctionCallSchema(_Schema):
    parts: ClassVar[dict[str, Any]] = {"name": ..., "arguments": {}}


class OpenAIFunctionToolCall(_Schema):
    parts: ClassVar[dict[str, Any]] = {"id": ..., "type": "function", "function": ...}
    inner: ClassVar[dict[str, type[_Schema]]] = {"function": OpenAIFunctionCallSchema}


class BaseTool(_BaseTool):
    """A tool with state. `tool_schema` is an `OpenAIFunctionToolSchema`, `name` what the policy calls it by."""

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        own = tool_schema or self.get_openai_tool_schema()
        self.tool_schema = OpenAIFunctionToolSchema.model_validate(own)
        self.name = self.tool_schema.function.name


class Gsm8kTool(BaseTool):
    """Says whether an answer to a question of GSM8K is right. A wrong one that is given again costs a little."""

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self._best: dict[str, float] = {}
        self._truth: dict[str, str] = {}

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        name = instance_id or "0"
        self._truth[name] = str(ground_truth or (kwargs.get("create_kwargs") or {}).get("ground_truth", ""))
        self._best[name] = 0.0
        return name, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        answer = str(parameters.get("answer", ""))
        reward = self._score(instance_id, answer)
        step_reward = 0.0 if reward > self._best[instance_id] else -0.05
        self._best[instance_id] = reward
        return ToolResponse(text=f"Current parsed answer={answer!r} reward={reward}"), step_reward, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return self._best[instance_id]

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._best.pop(instance_id, None)
        self._truth.pop(instance_id, None)

    def _score(self, instance_id: str, answer: str) -> float:
        from quadriga.rewards.scorers.gsm8k import compute_score

        text = answer if answer.startswith("#### ") else f"#### {answer}"
        return float(compute_score(text, self._truth[instance_id], method="flexible"))


class SandboxFusionTool(BaseTool):
    """Runs a Python program, shut in on this machine; verl's sends it to a service. The parts that subclasses use are there."""

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self.default_timeout = config.get("default_timeout", 30)
        self.default_language = config.get("default_language", "python")
        self.num_workers = config.get("num_workers", 10)
        self.use_ray_execution_pool = False
        self._async_semaphore = asyncio.Semaphore(self.num_workers)
        self.execution_pool = SimpleNamespace(execute=SimpleNamespace(remote=_in_a_thread))

    def execute_code(self, instance_id: str, code: str, timeout: float = 30, language: str = "python") -> ToolResponse:
        """What the program printed, and its error if it failed."""
        from quadriga.rewards.sandbox import Limits, run

        if language != "python":
            return ToolResponse(text=f"only python programs are run here, not {language}")
        result = run(code, limits=Limits(wall_s=float(timeout), cpu_s=float(timeout), memory_mb=512, file_mb=4))
        if result.status in ("timeout", "died"):
            return ToolResponse(text="the program did not end in time, or was stopped")
        if not result.isolated:
            raise RuntimeError("this machine cannot shut programs in, so none is run")
        return ToolResponse(text=f"{result.stdout}{result.error or ''}")

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, Any, Any]:
        code, timeout = str(parameters.get("code", "")), parameters.get("timeout", self.default_timeout)
        language = parameters.get("language", self.default_language)
        async with self._async_semaphore:
            return await _in_a_thread(self.execute_code, instance_id, code, timeout, language), None, None


def _in_a_thread(function: Any, *args: Any) -> Any:
    return asyncio.get_running_loop().run_in_executor(None, function, *args)
