#!/usr/bin/env bash
# GRPO on GSM8K: 8 answers to each question, compared with each other; no critic.
#   MODEL=~/models/Qwen2.5-0.5B-Instruct GPUS=8 examples/gsm8k/run_grpo.sh
set -euo pipefail
: "${MODEL:?set MODEL to a model folder or hub name}"
export DATA=${DATA:-$HOME/data/gsm8k}
"$(dirname "$0")/prepare.sh"

quadriga train \
    actor_rollout_ref.model.path="$MODEL" \
    data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
    data.train_batch_size=128 data.max_prompt_length=512 data.max_response_length=512 \
    data.filter_overlong_prompts=True \
    algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \
    trainer.n_gpus_per_node="${GPUS:-1}" trainer.total_epochs=3 trainer.test_freq=10 trainer.save_freq=20 \
    trainer.experiment_name=gsm8k_grpo "$@"
