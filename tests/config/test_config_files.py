"""The YAML file and the reference page are what the schema says, and the file works in all the ways it is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from quadriga.config import CONFIG_DIR, Config, load_config
from quadriga.config.fields import spec_of
from quadriga.config.render import DOCS_PAGE, main, page_with_reference, render_markdown, render_yaml
from quadriga.config.typed import all_keys, all_sections, default_values

YAML = CONFIG_DIR / "ppo_trainer.yaml"
WRITE = "run `python -m quadriga.config.render --write`"


def test_yaml_file_is_rendered_from_the_schema() -> None:
    assert YAML.read_text(encoding="utf-8") == render_yaml(), WRITE


def test_yaml_values_are_the_defaults_of_the_schema() -> None:
    values = OmegaConf.to_container(OmegaConf.load(YAML), resolve=False)
    assert isinstance(values, dict)
    del values["hydra"]
    assert values == default_values(Config)


def test_reference_page_is_rendered_from_the_schema() -> None:
    if not DOCS_PAGE.is_file():
        pytest.skip("the docs are not part of an installed package")
    page = DOCS_PAGE.read_text(encoding="utf-8")
    assert page == page_with_reference(page), WRITE


def test_every_key_and_section_is_documented() -> None:
    from dataclasses import fields, is_dataclass

    def walk(section: object) -> None:
        for declared in fields(section):  # type: ignore[arg-type]
            assert len(spec_of(declared).doc) > 3, declared.name
            if is_dataclass(value := getattr(section, declared.name)):
                walk(value)

    walk(Config())
    yaml, page = render_yaml(), render_markdown()
    for path in all_keys(Config):
        name = path.rsplit(".", 1)[-1]
        assert f"{name}: " in yaml
        assert f"| `{name}` |" in page
    for section in all_sections(Config):
        assert f"`{section}`" in page


def test_lines_of_the_yaml_file_fit_a_screen() -> None:
    assert max(map(len, render_yaml().splitlines())) <= 120


def test_rendering_writes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out == render_yaml()
    assert main(["--markdown"]) == 0
    assert capsys.readouterr().out == render_markdown()
    assert main(["--what"]) == 2


def test_file_loaded_and_changed_in_python_works() -> None:
    config = OmegaConf.load(YAML)
    config.trainer.n_gpus_per_node = 8
    config.trainer.nnodes = 1
    loaded = load_config(config)  # type: ignore[arg-type]
    assert loaded.trainer.n_gpus_per_node == 8
    assert loaded == load_config({"trainer": {"n_gpus_per_node": 8}})


def test_hydra_application_leaves_no_files_and_adds_no_log_handlers(tmp_path: Path) -> None:
    application = tmp_path / "app.py"
    application.write_text(
        "import logging, hydra\n"
        f"@hydra.main(config_path={str(CONFIG_DIR)!r}, config_name='ppo_trainer', version_base=None)\n"
        "def main(config):\n"
        "    logging.basicConfig(level='INFO', format='LOG %(message)s')\n"
        "    logging.getLogger('x').info('nodes %s', config.trainer.nnodes)\n"
        "main()\n"
    )
    folder = tmp_path / "empty"
    folder.mkdir()
    command = [sys.executable, str(application), "trainer.nnodes=3"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout + done.stderr).splitlines() == ["LOG nodes 3"]
    assert list(folder.iterdir()) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["app.py", "empty"]


def test_importing_the_configuration_loads_nothing_heavy() -> None:
    code = (
        "import sys, quadriga.config, quadriga.config.plan, quadriga.config.needs\n"
        "print([m for m in ('torch', 'ray', 'transformers', 'pyarrow', 'hydra') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
