"""verl's importable names over Quadriga: after `import quadriga.compat.verl`, `import verl` and what lies below it work.

The names, arguments, results and metric names are verl's; what happens behind them is Quadriga's, so that reward files,
datasets, samplers, reward managers and recipes written for verl run. The alias is opt-in and lasts for the process and
those it starts (`QUADRIGA_COMPAT_VERL=1` in their environment). A module or name without counterpart says so.

    python -m quadriga.compat.verl -m verl.trainer.main_ppo key=value …    # a module, with verl's command line
    python -m quadriga.compat.verl my_recipe.py …                          # a program of yours that imports verl
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from importlib.resources.abc import TraversableResources
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "QUADRIGA_COMPAT_VERL"
"""Set to 1 for the processes that this one starts, so that they have the alias too."""
HERE = "quadriga.compat.verl"

MODULES: dict[str, str | None] = {
    "verl": f"{HERE}.root",
    "verl.protocol": "quadriga.protocol",
    "verl.base_config": f"{HERE}.configs",
    "verl.version": f"{HERE}.root",
    # single_controller
    "verl.single_controller": f"{HERE}.single_controller",
    "verl.single_controller.base": f"{HERE}.single_controller",
    "verl.single_controller.base.decorator": f"{HERE}.single_controller",
    "verl.single_controller.base.worker": f"{HERE}.single_controller",
    "verl.single_controller.base.worker_group": f"{HERE}.single_controller",
    "verl.single_controller.ray": f"{HERE}.single_controller",
    "verl.single_controller.ray.base": f"{HERE}.single_controller",
    # trainer
    "verl.trainer": None,
    "verl.trainer.constants_ppo": "quadriga.trainer.constants_ppo",
    "verl.trainer.main_ppo": f"{HERE}.trainer",
    "verl.trainer.main_ppo_v0": f"{HERE}.trainer",
    "verl.trainer.fsdp_sft_trainer": f"{HERE}.trainer",
    "verl.trainer.sft_trainer": f"{HERE}.trainer",
    "verl.trainer.config": f"{HERE}.configs",
    "verl.trainer.config.algorithm": f"{HERE}.configs",
    "verl.trainer.config.config": f"{HERE}.configs",
    "verl.trainer.ppo": None,
    "verl.trainer.ppo.core_algos": f"{HERE}.core_algos",
    "verl.trainer.ppo.ray_trainer": f"{HERE}.trainer",
    "verl.trainer.ppo.utils": f"{HERE}.trainer",
    "verl.trainer.ppo.metric_utils": f"{HERE}.metrics",
    "verl.trainer.ppo.rollout_corr_helper": f"{HERE}.rollout_corr_helper",
    "verl.trainer.ppo.reward": f"{HERE}.rewards",
    # utils
    "verl.utils": f"{HERE}.utilities",
    "verl.utils.checkpoint": f"{HERE}.utilities",
    "verl.utils.checkpoint.checkpoint_manager": f"{HERE}.utilities",
    "verl.utils.config": f"{HERE}.configs",
    "verl.utils.device": f"{HERE}.devices",
    "verl.utils.fs": f"{HERE}.utilities",
    "verl.utils.hdfs_io": f"{HERE}.utilities",
    "verl.utils.import_utils": f"{HERE}.utilities",
    "verl.utils.logger": f"{HERE}.utilities",
    "verl.utils.logger.aggregate_logger": f"{HERE}.utilities",
    "verl.utils.memory_utils": f"{HERE}.devices",
    "verl.utils.model": f"{HERE}.utilities",
    "verl.utils.profiler": f"{HERE}.devices",
    "verl.utils.profiler.performance": f"{HERE}.devices",
    "verl.utils.profiler.profile": f"{HERE}.devices",
    "verl.utils.py_functional": f"{HERE}.utilities",
    "verl.utils.ray_utils": f"{HERE}.utilities",
    "verl.utils.rollout_skip": f"{HERE}.utilities",
    "verl.utils.rollout_trace": f"{HERE}.utilities",
    "verl.utils.tokenizer": f"{HERE}.utilities",
    "verl.utils.tracking": f"{HERE}.utilities",
    "verl.utils.torch_functional": f"{HERE}.torch_functional",
    "verl.utils.seqlen_balancing": f"{HERE}.seqlen_balancing",
    "verl.utils.metric": f"{HERE}.metrics",
    "verl.utils.metric.utils": f"{HERE}.metrics",
    "verl.utils.debug": f"{HERE}.devices",
    "verl.utils.debug.metrics": f"{HERE}.metrics",
    "verl.utils.debug.performance": f"{HERE}.devices",
    "verl.utils.reward_score": f"{HERE}.scorers",
    "verl.utils.reward_score.geo3k": f"{HERE}.scorers:geo3k",
    "verl.utils.reward_score.gsm8k": "quadriga.rewards.scorers.gsm8k",
    "verl.utils.reward_score.math": f"{HERE}.scorers:math_reward",
    "verl.utils.reward_score.math_batch": f"{HERE}.scorers:math_batch",
    "verl.utils.reward_score.math_dapo": f"{HERE}.scorers:math_dapo",
    "verl.utils.reward_score.math_reward": f"{HERE}.scorers:math_reward",
    "verl.utils.reward_score.math_verify": f"{HERE}.scorers:math_verify",
    "verl.utils.reward_score.prime_code": f"{HERE}.scorers:prime_code",
    "verl.utils.reward_score.prime_math": f"{HERE}.scorers:prime_math",
    "verl.utils.reward_score.search_r1_like_qa_em": f"{HERE}.scorers:search_r1_like_qa_em",
    "verl.utils.dataset": f"{HERE}.datasets",
    "verl.utils.dataset.rl_dataset": f"{HERE}.datasets",
    "verl.utils.dataset.sft_dataset": f"{HERE}.datasets",
    "verl.utils.dataset.multiturn_sft_dataset": f"{HERE}.datasets",
    # workers
    "verl.workers": None,
    "verl.workers.engine_workers": f"{HERE}.workers",
    "verl.workers.fsdp_workers": f"{HERE}.workers",
    "verl.workers.config": f"{HERE}.configs",
    "verl.workers.config.actor": f"{HERE}.configs",
    "verl.workers.config.critic": f"{HERE}.configs",
    "verl.workers.config.engine": f"{HERE}.configs",
    "verl.workers.config.model": f"{HERE}.configs",
    "verl.workers.config.optimizer": f"{HERE}.configs",
    "verl.workers.config.reward_model": f"{HERE}.configs",
    "verl.workers.config.rollout": f"{HERE}.configs",
    "verl.workers.reward_manager": f"{HERE}.rewards",
    "verl.workers.reward_manager.abstract": f"{HERE}.rewards",
    "verl.workers.reward_manager.registry": f"{HERE}.rewards",
    "verl.workers.reward_manager.naive": f"{HERE}.rewards",
    "verl.workers.reward_manager.batch": f"{HERE}.rewards",
    "verl.workers.reward_manager.dapo": f"{HERE}.rewards",
    "verl.workers.reward_manager.prime": f"{HERE}.rewards",
    # tools
    "verl.tools": f"{HERE}.tools",
    "verl.tools.base_tool": f"{HERE}.tools",
    "verl.tools.function_tool": f"{HERE}.tools",
    "verl.tools.gsm8k_tool": f"{HERE}.tools",
    "verl.tools.sandbox_fusion_tools": f"{HERE}.tools",
    "verl.tools.schemas": f"{HERE}.tools",
    # experimental
    "verl.experimental": None,
    "verl.experimental.dataset": None,
    "verl.experimental.dataset.sampler": f"{HERE}.datasets",
    "verl.experimental.reward": f"{HERE}.reward_loop",
    "verl.experimental.reward.reward_loop": f"{HERE}.reward_loop",
    "verl.experimental.reward.reward_loop.base": f"{HERE}.reward_loop",
    "verl.experimental.reward.reward_loop.registry": f"{HERE}.reward_loop",
    "verl.experimental.reward.reward_loop.naive": f"{HERE}.reward_loop",
    "verl.experimental.reward.reward_loop.dapo": f"{HERE}.reward_loop",
    "verl.experimental.reward_loop": f"{HERE}.reward_loop",
    "verl.experimental.reward_loop.reward_loop": f"{HERE}.reward_loop",
    "verl.experimental.reward_loop.reward_manager": f"{HERE}.reward_loop",
    "verl.experimental.reward_loop.reward_manager.base": f"{HERE}.reward_loop",
    "verl.experimental.reward_loop.reward_manager.registry": f"{HERE}.reward_loop",
    "verl.experimental.reward_loop.reward_manager.naive": f"{HERE}.reward_loop",
    "verl.experimental.reward_loop.reward_manager.dapo": f"{HERE}.reward_loop",
    "verl.experimental.reward_loop.reward_manager.gdpo": f"{HERE}.reward_loop",
    "verl.experimental.reward_loop.reward_manager.limited": f"{HERE}.reward_loop",
    "verl.experimental.reward_loop.reward_manager.remote": f"{HERE}.reward_loop",
}
"""verl's modules → the modules here that have their names, or `module:Class` where a class holds them; None for packages that only
hold others."""

MISSING = "Quadriga's alias of verl, which has no counterpart of that name: docs/coming_from.md"


class AliasModule(ModuleType):
    """A module of verl's: its names are looked up in the module behind it, which is imported when the first is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return [n for n in dir(_behind(self.__name__)) if not n.startswith("_")]
        if not name.startswith("__") or name == "__version__":
            found = getattr(_behind(self.__name__), name, _NOTHING)
            if found is not _NOTHING:
                return found
        if f"{self.__name__}.{name}" in MODULES:
            return importlib.import_module(f"{self.__name__}.{name}")
        raise AttributeError(f"{self.__name__}.{name} has no counterpart in Quadriga (docs/coming_from.md)")

    def __dir__(self) -> list[str]:
        behind = dir(_behind(self.__name__))
        return sorted({*super().__dir__(), *(name for name in behind if not name.startswith("_"))})


_NOTHING = object()


def _behind(module: str) -> object:
    """What has the names of one of verl's modules."""
    place, _, inner = (MODULES[module] or "").partition(":")
    if not place:
        return None
    found = importlib.import_module(place)
    return getattr(found, inner) if inner else found


class AliasFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `verl` and its modules here, and nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "verl":
            return None
        if fullname not in MODULES:
            raise ModuleNotFoundError(
                f"{fullname} has no counterpart in Quadriga: its alias of verl has the modules that docs/coming_from.md lists",
                name=fullname,
            )
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=MISSING, is_package=True)
        spec.submodule_search_locations = []
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return AliasModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        # Python names the file of a module that lacks a name, and so says what it is.
        module.__file__ = MISSING

    def get_resource_reader(self, fullname: str) -> TraversableResources | None:
        """For Hydra: what lies in `pkg://verl.trainer.config`."""
        return _ConfigFolder() if fullname == "verl.trainer.config" else None

    def get_code(self, fullname: str) -> Any:
        """For `python -m`: what `verl.trainer.main_ppo` does as a program."""
        return compile(
            f"import sys; from {HERE}.__main__ import run_module; sys.exit(run_module({fullname!r}, sys.argv[1:]))",
            fullname,
            "exec",
        )


class _ConfigFolder(TraversableResources):
    """Where a recipe finds ppo_trainer.yaml: verl's keys with verl's defaults."""

    def files(self) -> Path:
        return Path(__file__).parent / "config"


def install() -> None:
    """Let `import verl` find this alias, in this process and in those it starts. Twice does no harm."""
    os.environ[VARIABLE] = "1"
    if not any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
            del sys.modules[name]
        sys.meta_path.insert(0, AliasFinder())


install()
