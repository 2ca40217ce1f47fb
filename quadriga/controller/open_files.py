"""The driver holds a connection to each worker, and the usual limit of open files is 1,024."""

from __future__ import annotations

import resource

from quadriga.errors import ResourceError

SPARE = 256
"""Files, pipes and connections that a driver has besides those to its workers."""
ENOUGH = 65_536


def allow_connections(workers: int) -> None:
    """Raise this process's limit of open files as far as needed. ResourceError if it may not be raised so far."""
    needed = 2 * workers + SPARE  # one a worker was measured; a second one comes and goes
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ResourceError(
            f"the driver needs about {needed} open files for {workers} workers, and may have {hard}",
            f"start Ray on its node after `ulimit -n {ENOUGH}` (the limit may be in /etc/security/limits.conf)",
        )
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, max(needed, ENOUGH))
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
