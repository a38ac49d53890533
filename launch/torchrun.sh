#!/usr/bin/env bash
# Runs a training script on several ranks of this machine; slurm.sbatch does it on several machines.
#
# usage: launch/torchrun.sh RANKS SCRIPT [ARGUMENT ...]
#
# e.g. launch/torchrun.sh 2 examples/train_gpt.py --steps 100
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  print_usage
  exit
fi
[[ ${1:-} =~ ^[1-9][0-9]*$ && $# -ge 2 ]] ||
  die "got '$*'; accepted: RANKS SCRIPT [ARGUMENT ...], e.g. 2 examples/train_gpt.py"
ranks=$1
shift

need_env
choose_execution
share_cores "$ranks"
exec "$venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node="$ranks" "$@"
