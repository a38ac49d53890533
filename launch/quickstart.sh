#!/usr/bin/env bash
# Trains a small GPT on real text: two tensor-parallel ranks, the user guide's recipe, any machine.
#
# usage: launch/quickstart.sh [train_gpt.py option ...]
#
# e.g. launch/quickstart.sh --recipe bf16 --out runs/bf16
#
# Sets up .venv first (setup_env.sh). Writes metrics.jsonl and loss.png to runs/quickstart.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  print_usage
  exit
fi
"$root/launch/setup_env.sh"
exec "$root/launch/torchrun.sh" 2 "$root/examples/train_gpt.py" \
  --out "$root/runs/quickstart" --plot "$@"
