#!/usr/bin/env bash
# One run on nodes of Slurm, from an environment that has sensitivity and Ray 2.49 or newer (or load it below):
#   sbatch cluster/slurm.sh job.toml [OPTION of sensitivity run]...
# Where time is up first, it goes back to the queue, and then computes what is missing.
# Yours:
#SBATCH --job-name=sensitivity
#SBATCH --nodes=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=08:00:00
# One Ray a node, and nothing else of yours there: at its end Ray stops every Ray of the same user.
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
# Three minutes before its time is up this script hears of it.
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
job=${1:?"usage: sbatch slurm.sh JOB [OPTION of sensitivity run]..."}

# module load ...; source .../bin/activate

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# Outside the ports that Ray gives its workers, and seldom one that somebody has.
address="${nodes[0]}:$((20000 + SLURM_JOB_ID % 10000))"

export RAY_USAGE_STATS_ENABLED=0
# The network has other users: every job has a token of its own, which srun hands on.
RAY_AUTH_TOKEN=$(python3 -c "import secrets; print(secrets.token_hex(32))")
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
# /tmp/ray may be another user's. Short, since paths of sockets are.
export RAY_TMPDIR="/tmp/$USER-$SLURM_JOB_ID"
# Nodes that read Python from a shared disk are slow to come.
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300

# Slurm itself would end Ray and the run alike; so the run alone, on this node, is asked to finish what it has in hand.
export DRIVER="$RAY_TMPDIR.driver"
rm -f "$DRIVER"
late=
trap 'late=yes; kill -TERM "$(cat "$DRIVER")" || true' USR1
# shellcheck disable=SC2016
srun --export=ALL --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
  ray symmetric-run --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" --num-cpus="$SLURM_CPUS_PER_TASK" -- \
  bash -c 'echo $$ >"$DRIVER"; exec "$@"' bash \
  sensitivity run "$job" --address auto --grace 60 "${@:2}" &
status=0
# The first is cut short by the signal.
wait $! || wait $! || status=$?
# Where Ray could not start on this node, `ray symmetric-run` says so, and ends with 0.
[[ -e $DRIVER || $status -ne 0 ]] || status=1
if [[ $late && $status -eq 1 ]]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
