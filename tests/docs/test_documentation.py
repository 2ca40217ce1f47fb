"""The documentation: links lead somewhere, quoted messages and keys exist, and the site builds."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from quadriga.cli import COMMANDS
from quadriga.config.names import ADV_ESTIMATORS, POLICY_LOSSES
from quadriga.config.schema import Config
from quadriga.config.supervised_schema import SCHEMAS
from quadriga.config.typed import all_keys, is_free_form, is_known
from quadriga.errors import ConfigError
from quadriga.registry import import_named

REPO = Path(__file__).resolve().parents[2]
PAGES = [*sorted((REPO / "docs").glob("*.md")), REPO / "README.md", REPO / "examples" / "README.md"]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
KEY = re.compile(r"(?<![\w./…*])((?:[a-z_]+\.)+[a-z_]+)=(?!=)")
OF_OTHERS = {"configuration.md", "coming_from.md"}  # they name keys of other systems

pytestmark = pytest.mark.skipif(not (REPO / "docs").is_dir(), reason="needs docs/ of the checkout")


def ids(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(REPO)) for page in pages]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_links_lead_somewhere(page):
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = page if not path else (page.parent / path).resolve()
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link} has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_commands_and_keys_exist(page):
    text = page.read_text(encoding="utf-8")
    for command in re.findall(r"`{1,3}quadriga ([a-z]+)\b|^quadriga ([a-z]+)\b", text, flags=re.MULTILINE):
        assert (command[0] or command[1]) in COMMANDS, command
    if page.name in OF_OTHERS:
        return
    for key in KEY.findall(text):
        known = any(is_known(schema, key) or is_free_form(schema, key) for schema in (Config, *SCHEMAS.values()))
        own = any(known_key.endswith(f".{key}") for known_key in all_keys(Config))  # written without its section
        is_code = key.split(".")[0] in ("config", "self", "data_config", "torch", "draft", "chain_sum")
        assert known or own or is_code, f"{page.name} names {key}, which is no key"


def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", REPO / "scripts" / "docs_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["docs_hooks"] = module
    spec.loader.exec_module(module)
    return module


def test_quoted_messages_are_those_of_the_source():
    messages = list(hooks().texts())
    page = (REPO / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quotes = re.findall(r'\*\*"(.*?)"\*\*', page, flags=re.DOTALL)
    assert len(quotes) > 20
    for quote in quotes:
        parts = [re.escape(part) for part in " ".join(quote.split()).split("…")]
        pattern = re.compile(".*".join(parts), flags=re.DOTALL)
        assert any(pattern.search(message) for message in messages), f"no message of the source reads {quote!r}"


def test_every_message_of_the_source_can_be_listed():
    found = list(hooks().messages())
    assert len(found) > 200
    assert {message.kind for message in found} == set(hooks().KINDS)
    rendered = hooks().render()
    assert "have nothing to learn from" in rendered
    assert all(line.count(" | ") >= 2 for line in rendered.splitlines() if line.startswith("| "))


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs mkdocs (pip install '.[docs]')")
def test_the_site_builds_without_a_warning(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=REPO,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    page = (tmp_path / "site" / "troubleshooting.html").read_text(encoding="utf-8")
    assert "have nothing to learn from" in page
    assert "fonts.googleapis" not in page
    algorithms = (tmp_path / "site" / "algorithms.html").read_text(encoding="utf-8")
    assert "<i>s</i><sub>i</sub> = Σ<sub>t</sub> <i>r</i><sub>t</sub>" in algorithms
    for html in (tmp_path / "site").glob("*.html"):
        assert not re.findall(
            r'<(?:script|link)[^>]*(?:src|href)="https?://(?!example)', html.read_text(encoding="utf-8")
        ), html
    _search_from_disk(tmp_path / "site")


def _search_from_disk(site: Path) -> None:
    """In a browser, without a server: a word is typed into the search of the first page."""
    assert "var __index" in (site / "search" / "search_index.js").read_text(encoding="utf-8")[:100]
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        return
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    page = f"file://{site}/index.html?q=watchdog"
    shown = subprocess.run([browser, *options, page], capture_output=True, text=True, timeout=100).stdout
    assert re.search(r"[1-9]\d* matching document", shown), "nothing was found"


def test_figures_that_the_source_has_are_those_of_the_pages():
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    told = re.search(r"keys of the RL configuration \| about (\d+)", readme)
    assert told is not None
    assert abs(int(told[1]) - len(all_keys(Config))) <= 10
    told = re.search(r"estimators / policy losses \| (\d+) / (\d+)", readme)
    assert told is not None
    assert (int(told[1]), int(told[2])) == (len(ADV_ESTIMATORS), len(POLICY_LOSSES))


def test_every_file_of_faults_is_in_the_table():
    page = (REPO / "docs" / "reliability.md").read_text(encoding="utf-8")
    files = {file.name for file in (REPO / "tests" / "faults").glob("test_*.py")}
    assert files - set(re.findall(r"`(test_\w+\.py)`", page)) == {"test_neighbours.py"}, "which is about the others"


def test_formulas_are_typeset_and_code_is_left_alone():
    typeset = hooks().typeset
    assert (
        typeset("A_t = δ_t + γλ A_n(t)") == "<i>A</i><sub>t</sub> = <i>δ</i><sub>t</sub> + γλ <i>A</i><sub>n(t)</sub>"
    )
    assert typeset("Σ_{k≥t} r_k") == "Σ<sub>k≥t</sub> <i>r</i><sub>k</sub>"
    for code in ("`s_i`", "log_prob", "n_gpus_per_node", "```\ns_i\n```", "    s_i", "[x](a_b.md)", "https://a/b_c"):
        assert typeset(code) == code


def test_the_page_on_loops_shows_the_example_that_a_test_runs():
    code = (REPO / "examples" / "own_loop" / "own_loop.py").read_text(encoding="utf-8")
    assert f"```python\n{code}```" in (REPO / "docs" / "own_loop.md").read_text(encoding="utf-8")


def test_the_imports_of_a_loop_of_ones_own_are_public():
    tree = ast.parse((REPO / "examples" / "own_loop" / "own_loop.py").read_text(encoding="utf-8"))
    imports = [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module.startswith("quadriga")
    ]
    assert len(imports) > 5
    for node in imports:
        assert node.module.count(".") <= 1, f"{node.module} is no public package"
        public = importlib.import_module(node.module).__all__
        assert {alias.name for alias in node.names} <= set(public), node.module


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_no_row_of_a_table_is_cut_off_from_its_head(page):
    """An empty line ends a table: rows after it would be shown as text."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    lines = ["", *text.splitlines(), ""]
    for before, line, after in zip(lines, lines[1:], lines[2:]):
        starts = line.startswith("|") and not before.startswith("|")
        assert not starts or re.fullmatch(r"\|[\s:|-]+\|", after.strip()), line


def test_modules_and_names_that_pages_point_to_exist():
    wrong = []
    for page in PAGES:
        for dotted in re.findall(r"`(quadriga(?:\.\w+)+)", page.read_text(encoding="utf-8")):
            try:
                if importlib.util.find_spec(dotted) is not None:
                    continue
            except ModuleNotFoundError:
                pass
            try:
                import_named(*dotted.rsplit(".", 1), page.name)
            except (ConfigError, ModuleNotFoundError):
                wrong.append(f"{page.name}: {dotted}")
    assert wrong == []
