#!/usr/bin/env bash
# Makes .venv with torch, this package (editable) and what its tests and plots need.
#
# usage: launch/setup_env.sh [--python PATH] [--system-torch]
#
#   --python PATH    interpreter to build on, 3.11 or newer; default: the first one found
#   --system-torch   use the torch that this interpreter already has, such as a CUDA build
#
# A second run with nothing changed returns at once. Without options, those of the last run hold;
# remove .venv to forget them.
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
if [[ -f $venv/stamp && $(<"$venv/stamp") == "$stamp" ]]; then
  exit
fi

"$python" -c 'import ensurepip, venv' 2>/dev/null ||
  die "$python has no venv module; install it (Debian: python3-venv), or name another --python"
echo "setting up $venv (about a minute)"
venv_options=(--clear)
pip_options=(-qq --disable-pip-version-check)
if ((system_torch)); then
  "$python" -c 'import torch' 2>/dev/null || die "--system-torch, but $python has no torch"
  venv_options+=(--system-site-packages)
else
  pip_options+=(--constraint "$root/launch/constraints.txt")
fi
"$python" -m venv "${venv_options[@]}" "$venv"
"$venv/bin/python" -m pip install "${pip_options[@]}" --editable "${root}[test,plot]"
((${#options[@]} == 0)) || printf '%s\n' "${options[@]}" >"$venv/options"
echo "$stamp" >"$venv/stamp"
