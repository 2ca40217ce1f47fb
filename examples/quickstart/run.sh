#!/usr/bin/env bash
# The embedded model learns sums, on two cores in about a minute. `quadriga train` without arguments does the same.
set -euo pipefail
quadriga train --config-name=quickstart "$@"
