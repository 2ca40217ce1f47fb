"""Seeing a run: its directory, metrics, phases and sinks, the live console, and the summary at the end.

Runner: `Tracking`, `Phases`, `EventLog`. Driver: `quadriga.tracking.console.LiveView`, `quadriga.tracking.summary.report`.
"""

from quadriga.tracking.events import Event, EventLog
from quadriga.tracking.phases import Phases
from quadriga.tracking.run_directory import RunDirectory
from quadriga.tracking.sinks import check_sinks
from quadriga.tracking.timeline import Timeline
from quadriga.tracking.tracker import Tracking

__all__ = ["Event", "EventLog", "Phases", "RunDirectory", "Timeline", "Tracking", "check_sinks"]
