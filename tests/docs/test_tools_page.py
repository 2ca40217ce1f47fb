"""docs/tools.md: its code runs as it stands there, and its tables are complete."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from quadriga.agents.tool_formats import tool_format_names
from quadriga.agents.tools import BUILT_IN, KINDS, Toolbox

REPO = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (REPO / "docs").is_dir(), reason="needs docs/ of the checkout")


@pytest.fixture
def page() -> str:
    return (REPO / "docs" / "tools.md").read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def test_tables_name_every_format_kind_and_tool(page):
    own = {"llama3_json"}  # another name of llama3
    tried_in_tests = {"shouting"}
    for name in {*tool_format_names(), *KINDS, *BUILT_IN} - own - tried_in_tests:
        assert f"`{name}`" in page, name


def test_the_tools_and_the_program_of_the_page_run(page, tmp_path, monkeypatch):
    function, notebook, _, program = blocks(page, "python")
    (tmp_path / "my_tools.py").write_text(notebook + function)
    (tmp_path / "program.py").write_text(program)
    ran = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ran.stdout.splitlines()[0] == "391 None", ran.stderr
    assert "'calls': 1" in ran.stdout
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "my_tools.py").write_text(notebook)
    (tmp_path / "servers.json").write_text(blocks(page, "json")[0])
    config = tmp_path / "tools.yaml"
    config.write_text(blocks(page, "yaml")[0].replace("servers.json", str(tmp_path / "servers.json")))
    toolbox = Toolbox.from_config(str(config))
    assert [source.target for source in toolbox._sources] == [
        "my_package.my_tools:Notebook",
        "quadriga.agents.builtin_tools:calculator",
    ]
    assert set(toolbox._wanted_servers) == {"files", "search"}


def test_the_conversation_of_the_page_runs(page):
    from transformers import AutoTokenizer

    import quadriga

    tokenizer = AutoTokenizer.from_pretrained(Path(quadriga.__file__).parent / "assets" / "arithmetic")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    )
    code = compile(blocks(page, "python")[2], "tools.md", "exec")
    space = {"tokenizer": tokenizer}
    exec(code, space)
    assert space["new_ids"]


def test_the_commands_of_the_page_write_rows(page, tmp_path):
    pytest.importorskip("reasoning_gym", reason="needs the extra quadriga[reasoning_gym]")
    from quadriga.commands.prep import main

    for number, command in enumerate(re.findall(r"^quadriga (prep .*)$", page, flags=re.MULTILINE)):
        words = command.replace("~", str(tmp_path / str(number))).split()
        small = ["--train-size", "6", "--test-size", "3"]
        assert main([*words[1:], *small]) == 0
        assert list((tmp_path / str(number)).rglob("train.parquet"))
