"""A program as a user of openai-agents writes it; where the model is, it has from the environment."""

import asyncio

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_default_openai_api("chat_completions")
set_tracing_disabled(True)
called = []


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    called.append((a, b))
    return a + b


agent = Agent(name="Adder", instructions="You add numbers with the tool.", tools=[add], model="caller")


async def main() -> None:
    result = await Runner.run(agent, "What is 2+3?")
    print("whole:", result.final_output)
    streamed = Runner.run_streamed(agent, "What is 2+3?")
    async for _ in streamed.stream_events():
        pass
    print("streamed:", streamed.final_output)
    print("called:", called)


asyncio.run(main())
