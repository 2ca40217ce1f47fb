"""Configuration: the typed schema, how it is loaded, and what it implies."""

from quadriga.config.load import CONFIG_DIR, as_plain_dict, compose, load_config, screen_overrides
from quadriga.config.schema import Config

__all__ = ["CONFIG_DIR", "Config", "as_plain_dict", "compose", "load_config", "screen_overrides"]
