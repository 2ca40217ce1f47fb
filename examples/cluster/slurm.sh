#!/bin/bash
# One training run over the nodes of a Slurm job. Submit it with what the run needs, and the run's own keys behind it:
#
#   sbatch --nodes=4 --gpus-per-node=8 --cpus-per-task=64 --exclusive examples/cluster/slurm.sh \
#       trainer.n_gpus_per_node=8 algorithm.adv_estimator=grpo …
#
# One task a node is one Ray node. The environment with Quadriga, the model and the data must lie at the same path on every node.
#SBATCH --ntasks-per-node=1
#SBATCH --job-name=quadriga
set -euo pipefail

here=${QUADRIGA_CLUSTER_FOLDER:-$SLURM_SUBMIT_DIR/examples/cluster} # Slurm runs a copy of this script, elsewhere
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN # of this job alone; srun hands it to the tasks
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
HEAD_ADDRESS=$(getent ahostsv4 "$first" | awk 'NR == 1 {print $1}')
export HEAD_ADDRESS HEAD_PORT=${HEAD_PORT:-$((20000 + SLURM_JOB_ID % 10000))}

# The first task ends when the run does, and the others when it has ended; --kill-on-bad-exit ends all when one fails.
srun --kill-on-bad-exit=1 --wait=120 bash "$here/slurm_task.sh" "$@"
