#!/bin/bash
# Several hosts under Slurm, one process per GPU, as JAX expects there: srun tells each
# process where the first one is, which it is and of how many.
#
#   sbatch experiments/launch/slurm.sh
#
# Fill in: the partition or account of your cluster, where the sources and an environment
# with jaxckpt[cuda] are, and a work folder that all hosts share. A job that ended goes
# on when it is submitted again: it resumes where there is a snapshot.
#SBATCH --job-name=jaxckpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue

set -euo pipefail

SOURCES="${SOURCES:-$SLURM_SUBMIT_DIR}"
WORKDIR="${WORKDIR:-$SLURM_SUBMIT_DIR/runs/llama3-8b}"
cd "$SOURCES"

RESUME=""
if compgen -G "$WORKDIR/snapshots/[0-9]*" > /dev/null; then
    RESUME="--resume"
fi

# A process that ends in an error ends the job step; the others say why themselves.
srun --kill-on-bad-exit=1 --label python -m jaxckpt.train \
    --model=llama3-8b \
    --mesh=fsdp:16 \
    --batch-size=16 \
    --policy=save:context,out_proj \
    --steps=10000 \
    --workdir="$WORKDIR" \
    $RESUME
