"""`verl.workers.config`, `verl.trainer.config`, `verl.utils.config`: configuration objects that user code builds or checks.

An object is a section of Quadriga's configuration, built with verl's keys: those that Quadriga has are checked, the others
stay readable as they were given.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from quadriga.compat.command import show
from quadriga.compat.translation import as_argument, translate
from quadriga.compat.verl.whole_config import differences
from quadriga.config import Config, load_config
from quadriga.config import schema_algorithm as _algorithm
from quadriga.config import schema_models as _models
from quadriga.config import schema_roles as _roles
from quadriga.config import schema_rollout as _rollout
from quadriga.config.needs import need_critic, need_reference_policy

__all__ = ["need_critic", "need_reference_policy", "omega_conf_to_dataclass", "validate_config"]


class BaseConfig:
    """Keys that can be read as attributes or as items, as verl's dataclasses can."""

    section: type = object
    """The section of Quadriga's configuration that the object stands for."""

    def __init__(self, **given: Any) -> None:
        known = {field.name for field in fields(self.section)} if is_dataclass(self.section) else set()
        self._own: Any = self.section(**{name: value for name, value in given.items() if name in known})
        self._foreign = {name: value for name, value in given.items() if name not in known}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._foreign:
            return self._foreign[name]
        return getattr(self._own, name)

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._foreign[name] = value

    def __contains__(self, name: str) -> bool:
        return hasattr(self, name)

    def __iter__(self) -> Any:
        return iter({**vars(self._own), **self._foreign})


def _config(name: str, section: type) -> type:
    return type(name, (BaseConfig,), {"section": section, "__doc__": f"verl's {name}: {section.__name__} here."})


ActorConfig = _config("ActorConfig", _roles.ActorConfig)
FSDPActorConfig = _config("FSDPActorConfig", _roles.ActorConfig)
CriticConfig = _config("CriticConfig", _roles.CriticConfig)
FSDPCriticConfig = _config("FSDPCriticConfig", _roles.CriticConfig)
RolloutConfig = _config("RolloutConfig", _rollout.RolloutConfig)
SamplingConfig = _config("SamplingConfig", _rollout.ValKwargsConfig)
PolicyLossConfig = _config("PolicyLossConfig", _roles.PolicyLossConfig)
OptimizerConfig = _config("OptimizerConfig", _models.OptimConfig)
FSDPOptimizerConfig = _config("FSDPOptimizerConfig", _models.OptimConfig)
FSDPEngineConfig = _config("FSDPEngineConfig", _models.FSDPConfig)
AgentLoopConfig = _config("AgentLoopConfig", _rollout.AgentConfig)
MultiTurnConfig = _config("MultiTurnConfig", _rollout.MultiTurnConfig)
DistillationConfig = _config("DistillationConfig", _algorithm.DistillationConfig)
DistillationLossConfig = _config("DistillationLossConfig", _algorithm.DistillationLossConfig)
CheckpointConfig = _config("CheckpointConfig", object)
RouterReplayConfig = _config("RouterReplayConfig", object)
ProfilerConfig = _config("ProfilerConfig", _models.ProfilerConfig)
HFModelConfig = _config("HFModelConfig", _models.ModelConfig)
RewardModelConfig = _config("RewardModelConfig", _roles.RewardModelConfig)
AlgoConfig = _config("AlgoConfig", _algorithm.AlgorithmConfig)
KLControlConfig = _config("KLControlConfig", _algorithm.KLControlConfig)
FilterGroupsConfig = _config("FilterGroupsConfig", _algorithm.FilterGroupsConfig)
RolloutCorrectionConfig = _config("RolloutCorrectionConfig", _algorithm.RolloutCorrectionConfig)


def omega_conf_to_dataclass(config: Any, dataclass_type: type | None = None) -> Any:
    """`config` as an object of `dataclass_type`; without one, as it is."""
    if dataclass_type is None or not config:
        return config
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else dict(config)
    return dataclass_type(**{str(name): value for name, value in plain.items() if name != "_target_"})  # type: ignore[union-attr]


def validate_config(config: Any, use_reference_policy: bool = False, use_critic: bool = False) -> None:
    """
    Raises:
        ConfigError: what `quadriga plan --from-verl` would refuse.
    """
    load_config(understood(config))


def understood(config: Any) -> dict[str, Any]:
    """A whole configuration with verl's keys, as Quadriga's; verl's defaults hold where it leaves something open.

    Raises:
        ConfigError: a key is refused.
    """
    translation = translate([f"{key}={as_argument(value)}" for key, value in differences(config).items()])
    if translation.rows.keys() not in _SHOWN:
        _SHOWN.append(translation.rows.keys())
        show(translation)
    translation.raise_if_refused()
    return translation.nested()


_SHOWN: list[Any] = []
"""The keys of the tables that this process has printed."""


def as_checked(config: Any) -> Config:
    """A configuration with verl's keys, or one of Quadriga's, typed and checked."""
    return config if isinstance(config, Config) else load_config(understood(config))
