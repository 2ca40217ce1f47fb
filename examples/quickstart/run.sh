#!/usr/bin/env bash
# The embedded model learns sums, on two cores in about half a minute; `quadriga train` without arguments is the same. Each start is a new run.
set -euo pipefail
quadriga train --config-name=quickstart "$@"
