#!/usr/bin/env bash
# GRPO that trains a LoRA adapter only. The reference of the KL term is the actor without its adapter: no second model.
#   MODEL=~/models/Qwen2.5-7B-Instruct GPUS=8 examples/lora/run_grpo_lora.sh
set -euo pipefail
here=$(dirname "$0")
"$here/../gsm8k/run_grpo.sh" \
    actor_rollout_ref.model.lora_rank=32 actor_rollout_ref.model.lora_alpha=32 \
    actor_rollout_ref.actor.optim.lr=1e-5 \
    trainer.experiment_name=gsm8k_grpo_lora "$@"
