#!/usr/bin/env bash
# The embedded model learns to find a digit in fewer guesses. CPU, two minutes.
#   OUT=outputs/guessing examples/guessing/run.sh
set -euo pipefail
here=$(dirname "$0")
OUT=${OUT:-outputs/guessing}
SFT_STEPS=${SFT_STEPS:-100} STEPS=${STEPS:-100}
python "$here/make_data.py" "$OUT/data"

quadriga sft model.partial_pretrain=builtin:arithmetic \
    data.train_files="$OUT/data/lessons.jsonl" data.train_batch_size=64 data.max_length=32 \
    optim.lr=1e-3 trainer.total_training_steps="$SFT_STEPS" trainer.log_freq=50 trainer.default_local_dir="$OUT/sft"

quadriga train actor_rollout_ref.model.path="$OUT/sft/huggingface" \
    actor_rollout_ref.rollout.agent.default_agent_loop="$here/game.py:Guess" \
    actor_rollout_ref.rollout.multi_turn.max_tokens_per_turn=1 \
    data.train_files="$OUT/data/train.jsonl" data.val_files="$OUT/data/test.jsonl" \
    data.train_batch_size=16 data.max_prompt_length=8 data.max_response_length=24 \
    algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=16 actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    actor_rollout_ref.actor.optim.lr=5e-4 actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 actor_rollout_ref.rollout.val_kwargs.n=8 \
    trainer.total_training_steps="$STEPS" trainer.test_freq="$STEPS" trainer.default_local_dir="$OUT/rl" "$@"
