#!/usr/bin/env bash
# Sets up .venv (setup_env.sh) and runs the tests.
#
# usage: launch/test.sh [pytest option ...]     (paths are from the repository's root)
#
# e.g. launch/test.sh --run-slow, or launch/test.sh tests/formats -k mxfp8
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  print_usage
  exit
fi
"$root/launch/setup_env.sh"
share_cores 1
cd "$root"
exec "$venv/bin/python" -m pytest "$@"
