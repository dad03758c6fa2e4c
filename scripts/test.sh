#!/usr/bin/env bash
# All checks and tests of this machine, in an environment of their own, then ten steps of each training framework
# (scripts/frameworks.sh) and the Ascend kernels (scripts/ascend.sh) in theirs. Arguments go to pytest, and then nothing else
# is done:
#   bash scripts/test.sh
#   bash scripts/test.sh tests/strategies -k flce
# HERE=1 uses the python on PATH instead of making an environment. WORKERS is the number of test processes (default 2).
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

others= # whether the other environments' tests are run too
[ $# -gt 0 ] || [ -n "${HERE:-}" ] || others=1

# An install takes one core and waits for a network, so these are begun early. One that breaks off is tried again where it
# is needed, and says there what went wrong.
early() {
  "$@" > /dev/null 2>&1 &
}
stop_early() {
  local running
  running=$(jobs -pr)
  # shellcheck disable=SC2086 # a list
  [ -z "$running" ] || kill $running 2> /dev/null || true
  wait # or the next attempt would write where this one still does
}
trap stop_early EXIT

if [ -n "${HERE:-}" ]; then
  python=$(command -v "${PYTHON:-python3}")
else
  [ -z "$others" ] || early bash scripts/ascend.sh --install
  test_environment
  apart deepspeed deepspeed hjson ninja msgpack einops py-cpuinfo
  [ -z "$others" ] || early bash scripts/frameworks.sh --install
fi

if [ $# -eq 0 ]; then
  PATH="$(dirname "$python"):$PATH" bash scripts/check.sh
fi

# Nothing may be fetched while testing; the machine's cores go to test processes, not to threads.
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false MPLBACKEND=Agg
"$python" -m pytest -n "${WORKERS:-2}" --dist worksteal "$@"

if [ -n "$others" ]; then
  wait
  bash scripts/frameworks.sh --short
  bash scripts/ascend.sh # triton-ascend takes Triton's place
fi
