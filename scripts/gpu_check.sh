#!/usr/bin/env bash
# Proves on a machine with one NVIDIA GPU what cannot be proven without: engine verl (veRL's hybrid replicas) from start
# to stop. Under 8 minutes, nothing is downloaded, nothing is installed unless asked:
#
#   scripts/gpu_check.sh                      with $PYTHON, else .venv, else python3
#   scripts/gpu_check.sh --install            first: python3 -m venv .venv-gpu, pip install -e .[verl-gpu]
#   scripts/gpu_check.sh --model FOLDER       another model than a random one; --rollout sglang
#
# Prints PASS, FAIL and SKIP lines with reasons. Status 0: all passed; 1: something failed; 2: no GPU, nothing was checked.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

interpreter() {
  local candidate
  for candidate in "${PYTHON:-}" "$root/.venv-gpu/bin/python" "$root/.venv/bin/python" python3; do
    if [ -n "$candidate" ] && command -v "$candidate" >/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "no Python: set PYTHON" >&2
  exit 2
}

if [ "${1:-}" = --install ]; then
  shift
  python3 -m venv "$root/.venv-gpu"
  "$root/.venv-gpu/bin/pip" --disable-pip-version-check install --quiet --editable "$root[verl-gpu]"
fi

export PYTHONPATH="$root/core${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
exec timeout --kill-after=20 470 "$(interpreter)" "$root/scripts/lib/gpu_check.py" "$@"
