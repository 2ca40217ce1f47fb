"""Configuration: the typed schema, how it is loaded, and what it implies."""

from quadriga.config.load import CONFIG_DIR, as_plain_dict, compose, load_config, screen_overrides
from quadriga.config.schema import Config
from quadriga.config.schema_models import FSDPConfig, ModelConfig, OptimConfig

__all__ = [
    "CONFIG_DIR",
    "Config",
    "FSDPConfig",
    "ModelConfig",
    "OptimConfig",
    "as_plain_dict",
    "compose",
    "load_config",
    "screen_overrides",
]
