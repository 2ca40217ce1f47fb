#!/usr/bin/env bash
# PPO on GSM8K: one answer to each question, and a critic that predicts how it will be judged.
#   MODEL=~/models/Qwen2.5-0.5B-Instruct GPUS=8 examples/gsm8k/run_ppo.sh
set -euo pipefail
: "${MODEL:?set MODEL to a model folder or hub name}"
export DATA=${DATA:-$HOME/data/gsm8k}
"$(dirname "$0")/prepare.sh"

quadriga train \
    actor_rollout_ref.model.path="$MODEL" \
    data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
    data.train_batch_size=512 data.max_prompt_length=512 data.max_response_length=512 \
    data.filter_overlong_prompts=True \
    algorithm.adv_estimator=gae algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.001 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.optim.lr=1e-6 \
    critic.ppo_mini_batch_size=128 critic.optim.lr=1e-5 trainer.critic_warmup=5 \
    trainer.n_gpus_per_node="${GPUS:-1}" trainer.total_epochs=10 trainer.test_freq=10 trainer.save_freq=20 \
    trainer.experiment_name=gsm8k_ppo "$@"
