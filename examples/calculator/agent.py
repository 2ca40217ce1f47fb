"""An agent for a model of 19 characters: `*123+456=` is a call of the calculator, anything else is the answer."""

from __future__ import annotations

from quadriga.agents.policy import ToolCall


async def run(task, policy):
    """One call of the tool at most; the reward function scores what comes last."""
    text, [equals] = task.prompt, policy.encode("=")
    async with task.tools.session() as tools:
        answer = await policy.generate(text, stop_token_ids=[equals])
        if not (answer.text.startswith("*") and answer.text.endswith("=")):
            return
        expression = answer.text[1:-1]
        call = ToolCall("calculator", {"expression": expression}, raw=answer.text)
        result = await tools.call(call)
        policy.count(tool_calls=1, tool_errors=result.error is not None)
        said = result.text if result.error is None else "-"
        await policy.generate(text + answer.text + said + " ")
