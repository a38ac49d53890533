# shellcheck shell=bash
# Sourced by the scripts in this folder: where things are, and the variables that every run needs.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv

# With torchrun's shared store, ranks restarted after a failure can hang (pytorch issue 135712).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

die() {
  echo "${0##*/}: $*" >&2
  exit 1
}

# print_usage: the comment at the top of the calling script.
print_usage() {
  awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "$0"
}

# choose_execution: emulate MXFP8 and NVFP4 wherever the GPU does not multiply them itself.
choose_execution() {
  if [[ -z ${DIST_FINEGRAIN_EXECUTION:-} ]] &&
    ! nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -q '^10\.'; then
    export DIST_FINEGRAIN_EXECUTION=emulate
  fi
  echo "DIST_FINEGRAIN_EXECUTION=${DIST_FINEGRAIN_EXECUTION:-native}"
}

# share_cores RANKS: more threads than cores would only wait for each other.
share_cores() {
  local threads=$(($(getconf _NPROCESSORS_ONLN) / $1))
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
}

# need_env: the environment that setup_env.sh made.
need_env() {
  [[ -x $venv/bin/python ]] || die "no environment at $venv; run launch/setup_env.sh first"
}
