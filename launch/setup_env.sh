#!/usr/bin/env bash
# Makes .venv with torch, this package (editable, its extension compiled) and what its tests and
# plots need.
#
# usage: launch/setup_env.sh [--python PATH] [--system-torch]
#
#   --python PATH    interpreter to build on, 3.11 or newer; default: the first one found
#   --system-torch   use the torch that this interpreter already has, such as a CUDA build
#
# A second run with nothing changed returns at once; one with only csrc/ changed compiles what that
# touches. Without options, those of the last run hold; remove .venv to forget them. Build variables:
# DIST_FINEGRAIN_SKIP_CPU=1, DIST_FINEGRAIN_SKIP_CUDA=1, TORCH_CUDA_ARCH_LIST, MAX_JOBS.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if (($# == 0)) && [[ -f $venv/options ]]; then
  mapfile -t saved <"$venv/options"
  set -- "${saved[@]}"
fi
options=("$@")
python=
system_torch=0
while (($#)); do
  case $1 in
    -h | --help)
      print_usage
      exit
      ;;
    --python)
      [[ $# -ge 2 ]] || die "--python needs a path, e.g. --python /usr/bin/python3.12"
      python=$2
      shift
      ;;
    --system-torch) system_torch=1 ;;
    *) die "unknown option $1; accepted: --python PATH, --system-torch, --help" ;;
  esac
  shift
done

is_new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11 python; do
    if is_new_enough "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  die "no Python 3.11 or newer found; install one, or name it: --python PATH"
}

if [[ -z $python ]]; then
  python=$(find_python)
elif ! is_new_enough "$python"; then
  die "--python $python is not a Python 3.11 or newer"
fi

# Everything that the environment depends on; unchanged means there is nothing to do.
stamp=$(
  "$python" -c 'import sys; print(sys.version, sys.base_prefix)'
  echo "$root $system_torch"
  cat "$root/setup.py" "$root/launch/constraints.txt" "$root/launch/setup_env.sh"
)

# build_stamp: what the extension was compiled from, and that no other environment has replaced it.
build_stamp() {
  echo "${DIST_FINEGRAIN_SKIP_CPU:-} ${DIST_FINEGRAIN_SKIP_CUDA:-} ${TORCH_CUDA_ARCH_LIST:-}"
  find "$root/csrc" -type f -exec cksum {} + | sort
  cksum <"$root/dist_finegrain/_build.json" 2>/dev/null || echo "not built"
}

made=
if [[ -f $venv/stamp && $(<"$venv/stamp") == "$stamp" ]]; then
  [[ ! -f $venv/build_stamp || $(<"$venv/build_stamp") != "$(build_stamp)" ]] || exit 0
  made=1
fi

pip_options=(-qq --disable-pip-version-check)
((system_torch)) || pip_options+=(--constraint "$root/launch/constraints.txt")

# pip_install ARGUMENT ...: with the environment's own ninja on PATH.
pip_install() {
  PATH="$venv/bin:$PATH" "$venv/bin/python" -m pip install "${pip_options[@]}" "$@"
}

if [[ -z $made ]]; then
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "$python has no venv module; install it (Debian: python3-venv), or name another --python"
  echo "setting up $venv (some minutes)"
  venv_options=(--clear)
  build_needs=(setuptools wheel ninja pybind11)
  if ((system_torch)); then
    "$python" -c 'import torch' 2>/dev/null || die "--system-torch, but $python has no torch"
    venv_options+=(--system-site-packages)
  else
    build_needs+=(torch)
  fi
  "$python" -m venv "${venv_options[@]}" "$venv"
  pip_install "${build_needs[@]}"
  pip_install --no-build-isolation --editable "${root}[test,plot]"
else
  echo "compiling what has changed in csrc"
  pip_install --no-build-isolation --no-deps --editable "$root"
fi
"$venv/bin/python" -c 'import dist_finegrain; print(dist_finegrain.build_info())'
((${#options[@]} == 0)) || printf '%s\n' "${options[@]}" >"$venv/options"
build_stamp >"$venv/build_stamp"
echo "$stamp" >"$venv/stamp"
