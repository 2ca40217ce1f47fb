"""The names of `verl` itself."""

from __future__ import annotations

from quadriga.protocol import DataProto
from quadriga.version import __version__

__all__ = ["DataProto", "__version__"]
