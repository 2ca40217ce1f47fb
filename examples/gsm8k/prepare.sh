#!/usr/bin/env bash
# train.parquet and test.parquet in $DATA, from $GSM8K: a folder with train.jsonl and test.jsonl, or by default the hub.
set -euo pipefail
DATA=${DATA:-$HOME/data/gsm8k}
if [ ! -f "$DATA/train.parquet" ]; then
    quadriga prep gsm8k ${GSM8K:+--input "$GSM8K"} --output "$DATA"
fi
