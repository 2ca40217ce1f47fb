"""The documentation: links lead somewhere, quoted messages and keys exist, and the site builds."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from quadriga.cli import COMMANDS
from quadriga.config.schema import Config
from quadriga.config.supervised_schema import SCHEMAS
from quadriga.config.typed import all_keys, is_free_form, is_known

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
        is_code = key.split(".")[0] in ("config", "self", "data_config", "torch", "draft")
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
