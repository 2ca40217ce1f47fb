#!/bin/bash
# One task of slurm.sh: a Ray node. The first is the head and runs the command; the others are there as long as the head is.
set -euo pipefail

cores=${SLURM_CPUS_PER_TASK:-$(nproc)}
head_answers() { (exec 3<>"/dev/tcp/$HEAD_ADDRESS/$HEAD_PORT") 2>/dev/null; }
await_head() { for _ in $(seq 120); do head_answers && return || sleep 1; done; }
end_ray() { kill "$ray" 2>/dev/null && wait "$ray" 2>/dev/null || true; }

if [ "$SLURM_PROCID" -ne 0 ]; then
    await_head # it may start later than this task
    ray start --block --address "$HEAD_ADDRESS:$HEAD_PORT" --num-cpus "$cores" &
    ray=$!
    trap end_ray EXIT
    missed=0
    while [ "$missed" -lt 3 ]; do
        sleep 2
        if head_answers; then missed=0; else missed=$((missed + 1)); fi
    done
    exit 0 # how the job has ended is for the head to say
fi

ray start --block --head --node-ip-address "$HEAD_ADDRESS" --port "$HEAD_PORT" --num-cpus "$cores" --include-dashboard=false &
ray=$!
trap end_ray EXIT
await_head
# trainer.resource_wait_s: nodes that come later are waited for.
quadriga train "$@" trainer.nnodes="$SLURM_NTASKS" "+ray_kwargs.ray_init.address=$HEAD_ADDRESS:$HEAD_PORT" \
    trainer.resource_wait_s=180
