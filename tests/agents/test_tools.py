"""Tools: what they are made from, what comes back, and that nothing they do can harm the run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hostile_tools import SCHEMA

from quadriga.agents.builtin_tools import calculator
from quadriga.agents.episode import TURNS
from quadriga.agents.policy import ToolCall
from quadriga.agents.task import EpisodeOver, Task
from quadriga.agents.tool_agent import run as run_tool_agent
from quadriga.agents.tool_host import ToolSource
from quadriga.agents.tools import KINDS, Toolbox, ToolLimits, ToolResult, ToolSession
from quadriga.errors import ConfigError
from quadriga.rewards.processes import descendants
from quadriga.rewards.sandbox import can_isolate

HOSTILE = str(Path(__file__).with_name("hostile_tools.py"))
LIMITS = ToolLimits(timeout_s=3.0, max_response_length=100, max_parallel_calls=8, max_concurrent=4, memory_limit_mb=512)


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments, "", call_id="call00000")


def run(work: Callable[[Toolbox], Awaitable[Any]], *tools: Any, limits: ToolLimits = LIMITS, **more: Any) -> Any:
    """`work(toolbox)` in a loop of its own; afterwards no process is left."""
    before = set(descendants([os.getpid()]))

    async def main() -> Any:
        async with Toolbox(tools, limits=limits, **more) as toolbox:
            return await work(toolbox)

    result = asyncio.run(asyncio.wait_for(main(), 120))
    deadline = time.monotonic() + 10
    while left := set(descendants([os.getpid()])) - before:
        assert time.monotonic() < deadline, f"processes left behind: {left}"
        time.sleep(0.05)
    return result


@pytest.fixture(scope="module")
def hostile() -> Iterator[Callable[[Callable[[Toolbox], Awaitable[Any]]], Any]]:
    """`hostile(work)` with one toolbox of the hostile tools for all tests: what one does must not reach the next."""
    loop, toolbox = asyncio.new_event_loop(), Toolbox([HOSTILE], limits=LIMITS)
    yield lambda work: loop.run_until_complete(asyncio.wait_for(_started(toolbox, work), 60))
    loop.run_until_complete(toolbox.close())
    loop.close()


async def _started(toolbox: Toolbox, work: Callable[[Toolbox], Awaitable[Any]]) -> Any:
    await toolbox.start()
    return await work(toolbox)


def results_of(*calls: ToolCall, **options: Any) -> list[ToolResult]:
    async def work(toolbox: Toolbox) -> list[ToolResult]:
        async with toolbox.session() as tools:
            return await tools.call_all(calls)

    return run(work, HOSTILE, **options)


def test_functions_are_tools_with_the_schemas_that_transformers_makes():
    import hostile_tools
    from transformers.utils import get_json_schema

    async def work(toolbox: Toolbox) -> list[dict[str, Any]]:
        return toolbox.schemas

    schemas = run(work, HOSTILE, "calculator")
    assert [schema["function"]["name"] for schema in schemas] == ["add", "shout", "misbehave", "calculator"]
    assert schemas[0] == get_json_schema(hostile_tools.add)
    assert schemas[0]["function"]["parameters"]["required"] == ["a"]


def test_results_come_in_order_with_rewards_and_metrics():
    sums = [call("add", a=k, b=k) for k in range(6)]
    *sums, loud, default = results_of(*sums, call("shout", text="hi"), call("add", a=1))
    assert [result.text for result in sums] == ["0", "2", "4", "6", "8", "10"]
    assert (loud.text, loud.reward, loud.metrics, loud.error) == ("HI", 0.5, {"letters": 2.0}, None)
    assert default.text == "2"
    assert default.message == {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "2"}


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("hang", "timeout", "took longer than 3 s"),
        ("spin", "timeout", "took longer than 3 s"),
        ("segfault", "crash", "SIGSEGV"),
        ("exit", "crash", "exited with status 7"),
        ("system exit", "error", "SystemExit: bye"),
        ("raise", "error", "KeyError: 'nothing here'"),
        ("scribble", "crash", "did not work"),
        ("binary", "binary", "256 bytes that are no text"),
        ("picture", "binary", "an image or a video"),
        ("no reward", "error", "gave the reward nan"),
        ("child", None, "left a child"),
        ("text as bytes", None, "text"),
        ("nothing", None, ""),
        ("dict", None, '{"a": [1, "é"]}'),
        ("object", None, "<class 'set'>"),
        ("surrogate", None, "a?b"),
    ],
)
def test_whatever_a_tool_does_becomes_a_text_and_a_count_and_others_go_on(hostile, how, kind, text):
    async def work(toolbox: Toolbox) -> tuple[Any, ...]:
        async with toolbox.session() as tools:
            bad, good = await tools.call_all([call("misbehave", how=how), call("add", a=1)])
            after = await tools.call(call("add", a=2))
        return bad, good, after, tools.counts

    bad, good, after, counts = hostile(work)
    assert bad.error == kind
    assert text in bad.text
    assert (good.text, after.text) == ("2", "3")
    counts.pop("truncated", None)
    assert counts == {"calls": 3, **({kind: 1} if kind else {})}


def test_a_tool_that_fills_its_memory_is_stopped_and_others_go_on():
    """By its own allocation, or by who looks after it, whichever is first on this machine; it has time enough for either."""
    bad, good = results_of(call("misbehave", how="memory"), call("add", a=1), limits=replace(LIMITS, timeout_s=60.0))
    assert (bad.error, "MemoryError" in bad.text, "more than it may" in bad.text) in [
        ("error", True, False),
        ("crash", False, True),
    ]
    assert good.text == "2"


@pytest.mark.parametrize(
    ("side", "starts", "ends"), [("left", "...(", "c"), ("right", "a", ")..."), ("middle", "a", "c")]
)
def test_a_result_of_10_mb_is_cut_where_asked(side, starts, ends, tmp_path):
    file = tmp_path / "big.py"
    file.write_text("def big() -> str:\n    '''Big.'''\n    return 'a' + 10_000_000 * 'b' + 'c'\n")

    async def work(toolbox: Toolbox) -> ToolResult:
        async with toolbox.session() as tools:
            return await tools.call(call("big"))

    result = run(work, str(file), limits=ToolLimits(max_response_length=50, truncate_side=side))
    assert result.truncated
    assert len(result.text) == 50 + len("...(truncated)...")
    assert result.text.startswith(starts)
    assert result.text.endswith(ends)


@pytest.mark.parametrize(
    ("bad", "kind", "text"),
    [
        (ToolCall("", None, "{", error="it is no JSON"), "unreadable", "cannot be read: it is no JSON"),
        (call("ad", a=1), "unknown_tool", "no tool 'ad'. There are: add, shout, misbehave"),
        (call("add"), "bad_arguments", "'a' is a required property"),
        (call("add", a="x"), "bad_arguments", "a: 'x' is not of type 'integer'"),
        (call("add", a=1, c=2), "bad_arguments", "no argument 'c'; there are: a, b"),
    ],
)
def test_a_call_that_cannot_be_made_is_told_why(hostile, bad, kind, text):
    async def work(toolbox: Toolbox) -> ToolResult:
        async with toolbox.session() as tools:
            return await tools.call(bad)

    result = hostile(work)
    assert result.error == kind
    assert text in result.text
    assert kind in KINDS


def test_calls_beyond_the_allowed_number_are_told_so():
    first, second = results_of(call("add", a=1), call("add", a=2), limits=ToolLimits(max_parallel_calls=1))
    assert first.text == "2"
    assert (second.error, second.text) == ("dropped", "Error: only 1 of these calls is made at once. Call again.")


def test_an_episode_may_have_fewer_tools(hostile):
    async def work(toolbox: Toolbox) -> tuple[Any, ...]:
        async with toolbox.session(only=["add"]) as tools:
            return len(tools.schemas), await tools.call(call("shout", text="a"))

    shown, result = hostile(work)
    assert shown == 1
    assert (result.error, result.text) == ("unknown_tool", "Error: there is no tool 'shout'. There are: add.")


def test_no_more_calls_run_at_once_than_allowed(tmp_path):
    file = tmp_path / "slow.py"
    file.write_text("import time\ndef slow() -> str:\n    '''Slow.'''\n    time.sleep(0.3)\n    return 'ok'\n")

    async def work(toolbox: Toolbox) -> tuple[float, int]:
        began = time.monotonic()
        async with toolbox.session() as tools:
            assert {result.text for result in await tools.call_all([call("slow")] * 8)} == {"ok"}
        return time.monotonic() - began, toolbox._processes.started

    seconds, started = run(work, str(file))
    assert seconds > 0.55  # 8 calls of 0.3 s, four at once
    assert started <= 1 + 4


# -- state


def counter(tmp_path: Path) -> ToolSource:
    return ToolSource(f"{HOSTILE}:Counter", {"notes": str(tmp_path / "notes")}, SCHEMA)


def notes(tmp_path: Path) -> list[str]:
    return (tmp_path / "notes").read_text().split()


def test_a_tool_with_state_is_created_once_an_episode_and_released_once(tmp_path):
    async def work(toolbox: Toolbox) -> Any:
        async with toolbox.session({"counter": {"create_kwargs": {"start": 10}}}) as one, toolbox.session() as other:
            texts = [(await tools.call(call("counter", by=2))).text for tools in (one, other, one, one)]
        assert await one.close() == one.rewards  # once more is no error
        return texts, one.rewards, other.rewards

    texts, rewards, others = run(work, counter(tmp_path))
    assert texts == ["12", "2", "14", "16"]
    assert (rewards, others) == ({"counter": 16.0}, {"counter": 2.0})
    noted = notes(tmp_path)
    assert (noted.count("create"), noted.count("execute"), noted.count("release")) == (2, 4, 2)


def test_a_class_of_plain_methods_goes_by_the_name_in_its_schema():
    async def work(toolbox: Toolbox) -> Any:
        async with toolbox.session({"note": {"greeting": "hello"}}) as tools:
            result = await tools.call(call("note", text="a"))
        return toolbox.names, result, tools

    names, result, tools = run(work, f"{HOSTILE}:Notebook")
    assert names == ["note"]
    assert (result.text, result.metrics) == ('["hello", "a"]', {"notes": 2.0})
    assert tools.rewards == {"note": 2.0}
    assert tools.counts == {"calls": 1, "error": 1}  # it did not let itself be released


def test_a_tool_whose_process_dies_begins_anew_and_only_that_episode_notices(tmp_path):
    async def work(toolbox: Toolbox) -> Any:
        async with toolbox.session() as one, toolbox.session() as other:
            for tools in (one, other):
                await tools.call(call("counter", by=5))
            died = await one.call(call("counter", how="segfault"))
            return died, (await one.call(call("counter"))).text, (await other.call(call("counter"))).text

    died, one, other = run(work, counter(tmp_path))
    assert died.error == "crash"
    assert (one, other) == ("1", "6")


def test_an_episode_without_a_call_makes_no_tool(tmp_path):
    async def work(toolbox: Toolbox) -> None:
        async with toolbox.session():
            pass

    run(work, counter(tmp_path))
    assert not (tmp_path / "notes").exists()


def test_an_episode_that_is_cancelled_in_a_call_leaves_nothing(tmp_path):
    async def work(toolbox: Toolbox) -> str:
        async def episode() -> None:
            async with toolbox.session() as tools:
                await tools.call(call("counter", how="hang"))

        task = asyncio.create_task(episode())
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with toolbox.session() as tools:
            return (await tools.call(call("counter"))).text

    assert run(work, counter(tmp_path)) == "1"


# -- what goes wrong around them


def test_when_all_tool_processes_are_killed_the_next_call_has_new_ones():
    async def work(toolbox: Toolbox) -> list[ToolResult]:
        async with toolbox.session() as tools:
            first = await tools.call(call("add", a=1))
            hanging = asyncio.create_task(tools.call(call("misbehave", how="hang")))
            await asyncio.sleep(0.5)
            os.kill(toolbox._processes._nursery._process.pid, signal.SIGKILL)
            return [first, await hanging, await tools.call(call("add", a=2))]

    first, hanging, after = run(work, HOSTILE)
    assert (first.text, after.text) == ("2", "3")
    assert hanging.error == "crash"


def test_tools_end_with_the_process_that_uses_them(tmp_path):
    script = tmp_path / "user.py"
    script.write_text(
        textwrap.dedent(f"""
        import asyncio, os, signal
        from quadriga.agents.policy import ToolCall
        from quadriga.agents.tools import Toolbox
        from quadriga.rewards.processes import descendants
        async def main():
            async with Toolbox([{HOSTILE!r}]) as toolbox, toolbox.session() as tools:
                hanging = asyncio.create_task(tools.call(ToolCall("misbehave", {{"how": "hang"}}, "")))
                await asyncio.sleep(1.0)
                print(*descendants([os.getpid()]), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(main())
        """)
    )
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    pids = [int(pid) for pid in ran.stdout.split()]
    assert len(pids) >= 3, ran.stderr
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("raise ValueError('broken module')", "broken module"),
        ("def f(x: int) -> int:\n    '''F.'''\n    return x", "no schema.*no description for the argument 'x'"),
        ("def f(x):\n    '''F.\n\n    Args:\n        x: x\n    '''", "no schema.*type hint"),
        ("x = 1", "has no tool"),
        ("import os\nos._exit(3)", "cannot be imported"),
        (
            "def f() -> int:\n    '''F.'''\ndef g() -> int:\n    '''G.'''\ng.__name__ = 'f'",
            "two tools are called 'f'",
        ),
    ],
)
def test_tools_that_cannot_be_used_are_named_at_the_start(tmp_path, source, what):
    file = tmp_path / "tools.py"
    file.write_text(source)
    with pytest.raises(ConfigError, match=what):
        run(lambda toolbox: asyncio.sleep(0), str(file))


def test_wrong_names_and_limits_are_refused_at_once(tmp_path):
    for tool, what in [
        ("calculater", "there is no tool 'calculater'"),
        (str(tmp_path / "absent.py"), "there is no file"),
        (f"{tmp_path}/absent.py:f", "there is no file"),
    ]:
        with pytest.raises(ConfigError, match=what):
            Toolbox([tool])
    with pytest.raises(ConfigError, match="there are no tools"):
        Toolbox()
    with pytest.raises(ConfigError, match="none of left, right, middle"):
        ToolLimits(truncate_side="both")
    with pytest.raises(ConfigError, match="not above 0"):
        ToolLimits(timeout_s=0)


def test_a_closure_is_a_tool_too():
    factor = 3

    def times(x: int) -> int:
        """
        Multiplies.

        Args:
            x: A number.
        """
        return x * factor

    async def work(toolbox: Toolbox) -> str:
        async with toolbox.session() as tools:
            return (await tools.call(call("times", x=4))).text

    assert run(work, times) == "12"


# -- the configuration of verl


def test_verls_files_are_read(tmp_path, monkeypatch):
    (tmp_path / "own_tools.py").write_text(Path(HOSTILE).read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    config = tmp_path / "tools.yaml"
    config.write_text(
        "tools:\n"
        "  - class_name: own_tools.Counter\n"
        "    config: {type: native}\n"
        f"    tool_schema: {json.dumps(SCHEMA)}\n"
        "  - class_name: calculator\n"
    )
    toolbox = Toolbox.from_config(str(config), HOSTILE, limits=LIMITS)

    async def main() -> Any:
        async with toolbox, toolbox.session() as tools:
            return toolbox.names, (await tools.call(call("counter", by=4))).text

    names, text = asyncio.run(main())
    assert names == ["counter", "calculator", "add", "shout", "misbehave"]
    assert text == "4"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("tool: []", "KeyError"),
        ("tools: 3", "no list of entries"),
        ("tools: [{config: {}}]", "has no class_name"),
        ("tools: [{class_name: Counter}]", "names no module"),
        ("tools: [{config: {type: mcp}}]", "mcp_servers_config_path"),
        ("tools: [", "Error"),
    ],
)
def test_a_file_that_names_no_tools_is_refused(tmp_path, text, what):
    config = tmp_path / "tools.yaml"
    config.write_text(text)
    with pytest.raises(ConfigError, match=what):
        Toolbox.from_config(str(config))


# -- built in


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1+2*3", "7"),
        ("(17 + 5) * 3 / 4", "16.5"),
        ("0.1+0.2", "0.3"),
        ("-7 // 2", "-4"),
        ("2^10 × 3 ÷ 2", "1536"),
        ("1/3", "0.333333333333333"),
        ("2**-3", "0.125"),
        ("-1/8", "-0.125"),
        ("max(1, 2.5, 2) - abs(-1)", "1.5"),
        ("round(2.345, 1)", "2.3"),
        ("(-1)**1000000000001", "-1"),
        ("1e3", "1000"),
        ("3**1000/3**999", "3"),
    ],
)
def test_the_calculator_is_exact(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9",
        "1/0",
        "0**-1",
        "x+1",
        "__import__('os')",
        "1e999999999",
        "(" * 900,
        "1+" * 400,
        "True",
        "2**0.5",
        "'a'*3",
        "9" * 999 + "**2",
        "",
        "a" * 2000,
        "round(1, 10**9)",
        "max()",
        "1 if 1 else 2",
        "1\x00",
        "abs(1,2)",
        "10**1000*10**1000",
    ],
)
def test_the_calculator_refuses_in_bounded_time(expression):
    began = time.monotonic()
    with pytest.raises(ValueError):
        calculator(expression)
    assert time.monotonic() - began < 1


@pytest.mark.skipif(not can_isolate(), reason="this machine cannot shut programs in")
def test_python_runs_programs_that_are_shut_in():
    programs = {
        "print(sum(range(10)))": (None, "45"),
        "print(1)\nraise ValueError('no')": (None, "1\nValueError: no"),
        "open('/etc/passwd').read()": (None, "PermissionError"),
        "import socket; socket.socket()": (None, "PermissionError"),
        "import os; os._exit(1)": ("error", "ended without a result"),
    }

    async def work(toolbox: Toolbox) -> list[ToolResult]:
        async with toolbox.session() as tools:
            return await tools.call_all([call("python", code=code) for code in programs])

    for result, (kind, text) in zip(run(work, "python", limits=ToolLimits(max_parallel_calls=8)), programs.values()):
        assert result.error == kind
        assert text in result.text


def test_a_session_counts_what_came_of_its_calls(hostile):
    async def work(toolbox: Toolbox) -> ToolSession:
        async with toolbox.session() as tools:
            await tools.call_all([call("add", a=1), call("misbehave", how="10 MB"), call("nothing")])
            return tools

    assert hostile(work).counts == {"calls": 3, "truncated": 1, "unknown_tool": 1}


@pytest.mark.parametrize("ends", ["by itself", "at a limit"])
@pytest.mark.parametrize("counts", [True, False])
def test_what_tools_give_is_part_of_the_reward_unless_it_is_only_told(tmp_path, counts, ends):
    """As in verl with `multi_turn.tool_rewards=False`: rewards of calls and at the end are no one's to learn from."""

    class Policy:
        def __init__(self) -> None:
            self.given: list[float] = []
            self.calls: list[tuple[ToolCall, ...]] = [(call("counter", by=3),), ()]

        async def generate(self, messages: Any, tools: Any) -> Any:
            if len(self.calls) == 1 and ends == "at a limit":
                raise EpisodeOver(TURNS)
            return SimpleNamespace(message={"role": "assistant", "content": ""}, tool_calls=self.calls.pop(0))

        def reward(self, value: float) -> None:
            self.given.append(value)

        def count(self, **figures: int) -> None: ...

    async def work(toolbox: Toolbox) -> Any:
        policy = Policy()
        task = Task({"extra_info": {}}, "count", "uid", 0, 1, tools=toolbox)
        with nullcontext() if ends == "by itself" else pytest.raises(EpisodeOver):
            await run_tool_agent(task, policy)
        return policy.given

    given = run(work, counter(tmp_path), limits=replace(LIMITS, counts_rewards=counts))
    assert given == ([0.1, 3.0] if counts else [])
