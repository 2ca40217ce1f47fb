#!/usr/bin/env bash
# Supervised fine-tuning, then a reward model from preference pairs, then PPO against that reward model. CPU, two minutes.
#   OUT=outputs/sft_rm_ppo examples/sft_rm_ppo/run.sh
set -euo pipefail
here=$(dirname "$0")
OUT=${OUT:-outputs/sft_rm_ppo}
SFT_STEPS=${SFT_STEPS:-20} RM_STEPS=${RM_STEPS:-300} PPO_STEPS=${PPO_STEPS:-20}
python "$here/make_data.py" "$OUT/data"

quadriga sft model.partial_pretrain=builtin:arithmetic \
    data.train_files="$OUT/data/lessons.jsonl" data.train_batch_size=32 data.max_length=32 \
    optim.lr=3e-5 trainer.total_training_steps="$SFT_STEPS" trainer.log_freq=10 trainer.default_local_dir="$OUT/sft"

quadriga rm model.partial_pretrain="$OUT/sft/huggingface" \
    data.train_files="$OUT/data/pairs.jsonl" data.val_files="$OUT/data/pairs_test.jsonl" \
    data.train_batch_size=64 data.max_length=32 optim.lr=1e-3 \
    trainer.total_training_steps="$RM_STEPS" trainer.log_freq=50 trainer.default_local_dir="$OUT/rm"

quadriga train actor_rollout_ref.model.path="$OUT/sft/huggingface" \
    reward_model.enable=True reward_model.model.path="$OUT/rm/huggingface" \
    data.train_files="$OUT/data/train.parquet" data.val_files="$OUT/data/test.parquet" \
    data.train_batch_size=128 data.max_prompt_length=16 data.max_response_length=12 \
    algorithm.adv_estimator=gae actor_rollout_ref.actor.ppo_mini_batch_size=64 critic.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.optim.lr=3e-4 critic.optim.lr=1e-3 actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.05 \
    trainer.total_training_steps="$PPO_STEPS" trainer.test_freq=10 trainer.default_local_dir="$OUT/ppo" "$@"

for model in builtin:arithmetic "$OUT/sft" "$OUT/ppo"; do
    quadriga eval "$OUT/data/test.parquet" --model "$model" --max-new-tokens 12
done
