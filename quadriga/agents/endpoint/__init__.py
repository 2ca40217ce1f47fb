"""An OpenAI-style API in front of a policy, so that agents made for other models work, and learn, with ours.

`Endpoint` gives every episode of a training run a key of its own; `create_app` puts the same API in front of anything else.
"""

from __future__ import annotations

from quadriga.agents.endpoint.app import Backend, Caller, Limits, create_app
from quadriga.agents.endpoint.server import Endpoint

__all__ = ["Backend", "Caller", "Endpoint", "Limits", "create_app"]
