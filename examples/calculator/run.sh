#!/usr/bin/env bash
# The embedded model learns to call a calculator for sums that it cannot do alone. CPU, three minutes.
#   OUT=outputs/calculator examples/calculator/run.sh
set -euo pipefail
here=$(dirname "$0")
OUT=${OUT:-outputs/calculator}
SFT_STEPS=${SFT_STEPS:-1500} STEPS=${STEPS:-70}
python "$here/make_data.py" "$OUT/data"

quadriga sft model.partial_pretrain=builtin:arithmetic \
    data.train_files="$OUT/data/lessons.jsonl" data.train_batch_size=64 data.max_length=48 \
    optim.lr=2e-3 trainer.total_training_steps="$SFT_STEPS" trainer.log_freq=100 trainer.default_local_dir="$OUT/sft"

quadriga train actor_rollout_ref.model.path="$OUT/sft/huggingface" \
    actor_rollout_ref.rollout.agent.default_agent_loop="$here/agent.py:run" \
    'actor_rollout_ref.rollout.multi_turn.tools=[calculator]' \
    data.train_files="$OUT/data/train.jsonl" data.val_files="$OUT/data/test.jsonl" \
    data.train_batch_size=32 data.max_prompt_length=16 data.max_response_length=40 \
    algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.optim.lr=3e-4 actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    trainer.total_training_steps="$STEPS" trainer.test_freq="$STEPS" trainer.default_local_dir="$OUT/rl" "$@"
