#!/usr/bin/env bash
# The quickstart with the reward of reward.py; its "distance" becomes the metric reward/extra/distance.
set -euo pipefail
quadriga train --config-name=quickstart \
    custom_reward_function.path="$(dirname "$0")/reward.py" custom_reward_function.name=closeness "$@"
