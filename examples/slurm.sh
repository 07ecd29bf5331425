#!/usr/bin/env bash
# Sixteen nodes of eight GPUs: sbatch examples/slurm.sh --recipe llama2-7b --data.path /data/tokens --out /shared/runs/7b
#
# Slurm warns five minutes before the time limit, the run saves and ends, and the job is queued again: the same command
# goes on from its newest checkpoint. --requeue does the same after a failed node.
#SBATCH --job-name=fasttrain
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
set -uo pipefail

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun --kill-on-bad-exit=1 torchrun \
  --nnodes="$SLURM_NNODES" --nproc_per_node=8 --max_restarts=3 --shutdown_timeout=240 \
  --rdzv_id="$SLURM_JOB_ID" --rdzv_backend=c10d --rdzv_endpoint="$head_node:29500" \
  -m fasttrain.train "$@" &
job=$!
requeue() {
  kill -TERM "$job"
  wait "$job"
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
}
trap requeue TERM
wait "$job"
