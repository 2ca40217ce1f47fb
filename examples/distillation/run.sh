#!/usr/bin/env bash
# On-policy distillation: a teacher that has learnt sums by reinforcement teaches the embedded model, which sees no reward.
# CPU, under three minutes.
#   OUT=outputs/distillation examples/distillation/run.sh
set -euo pipefail
OUT=${OUT:-outputs/distillation}
TEACHER_STEPS=${TEACHER_STEPS:-30} STEPS=${STEPS:-20}

quadriga train --config-name=quickstart trainer.total_training_steps="$TEACHER_STEPS" trainer.test_freq=-1 \
    trainer.default_local_dir="$OUT/teacher" ${TEACHER_OPTIONS:-}

quadriga train --config-name=quickstart \
    distillation.enabled=True distillation.teacher_models.teacher_model.model_path="$OUT/teacher" \
    distillation.distillation_loss.use_task_rewards=False \
    distillation.distillation_loss.loss_mode=forward_kl_topk distillation.distillation_loss.topk=8 \
    actor_rollout_ref.rollout.n=2 actor_rollout_ref.actor.optim.lr=1e-3 \
    trainer.total_training_steps="$STEPS" trainer.test_freq=10 trainer.default_local_dir="$OUT/student" "$@"
