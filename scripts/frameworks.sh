#!/usr/bin/env bash
# Runs training frameworks' own commands, stock and with our keys, on a tiny model.
#   bash scripts/frameworks.sh                    # all that is tested of each: up to ten minutes for one
#   bash scripts/frameworks.sh axolotl            # one of: axolotl llamafactory swift lightning verl
#   bash scripts/frameworks.sh --short            # what scripts/test.sh runs: ten steps of each, a minute for all five
#   bash scripts/frameworks.sh --install          # nothing is run
# A framework and what it needs in other releases lie in a folder of their own, in front of the test environment's packages;
# torch is never installed with it. HERE=1 uses the packages of the python on PATH instead of making an environment. WORKERS
# is the number of frameworks that run side by side (default 2).
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

mode=all
if [ "${1:-}" = --short ] || [ "${1:-}" = --install ]; then
  mode=${1#--}
  shift
fi
all="axolotl llamafactory swift lightning verl"
# shellcheck disable=SC2086 # a list of names
[ $# -gt 0 ] || set -- $all
for framework in "$@"; do
  if [[ " $all " != *" $framework "* ]]; then
    echo "No framework '$framework' here. There are: $all." >&2
    exit 2
  fi
done

if [ -n "${HERE:-}" ]; then
  python=$(command -v "${PYTHON:-python3}")
else
  test_environment
fi

install() { # FOLDER WHAT...
  if ! "$python" -m pip install -qq --disable-pip-version-check --no-deps --no-compile \
    -c scripts/constraints_frameworks.txt --target "$@"; then
    echo "Installing ${*:2} for the framework in $1 failed; pip's own message is above. Often there is no network, or the" \
      "disk is full. When that is mended: bash scripts/frameworks.sh --install ${1##*/}" >&2
    exit 1
  fi
}

install_axolotl() {
  # it asks for Python 3.12 and runs on 3.11
  install "$1" --ignore-requires-python axolotl==0.21.0 trl==1.14.1 addict colorama posthog distro backoff evaluate wandb \
    sentry-sdk gitpython gitdb smmap platformdirs numba llvmlite termcolor protobuf fastcore sentencepiece bitsandbytes \
    opentelemetry-api fire httpx httpcore scipy einops python-dotenv
  # these two lie inside axolotl's own package, which pip does not merge
  install "$1/contribs" axolotl-contribs-mit==0.0.6 axolotl-contribs-lgpl==0.0.7
  cp -r "$1/contribs/axolotl/contribs" "$1/axolotl/"
}

install_llamafactory() {
  install "$1" llamafactory==0.9.5 transformers==5.6.0 tokenizers==0.22.2 huggingface_hub==1.33.0 accelerate==1.11.0 \
    peft==0.18.1 trl==0.24.0 datasets==4.0.0 multiprocess==0.70.16 dill==0.3.8 fsspec==2025.3.0 torchdata==0.11.0 \
    omegaconf antlr4-python3-runtime fire termcolor einops httpx httpcore sentencepiece protobuf hf_transfer av scipy \
    sse-starlette tyro typeguard docstring_parser shtab
  touch "$1/torchaudio.py" # imported on every start, used for audio only, and tied to one build of torch
}

install_swift() {
  install "$1" ms-swift==4.6.0 transformers==5.6.0 tokenizers==0.22.2 huggingface_hub==1.33.0 accelerate==1.11.0 \
    peft==0.18.1 trl==0.29.1 datasets==4.8.4 multiprocess==0.70.16 dill==0.3.8 fsspec==2025.3.0 modelscope==1.40.2 \
    modelscope_hub==0.5.1 addict json-repair cryptography cffi pycparser einops simplejson attrdict dacite binpacking \
    aiohttp aiohappyeyeballs aiosignal attrs frozenlist multidict propcache yarl httpx httpcore scipy sentencepiece \
    protobuf zstandard
}

install_lightning() {
  install "$1" lightning==2.6.6 pytorch-lightning==2.6.6 lightning-utilities torchmetrics
}

install_verl() {
  install "$1" verl==0.9.1 transformers==5.10.1 tokenizers==0.22.2 huggingface_hub==1.33.0 tensordict ray codetiming pyvers \
    hydra-core omegaconf antlr4-python3-runtime cloudpickle orjson msgpack jsonschema referencing rpds-py \
    jsonschema-specifications attrs click protobuf httpx httpcore
}

folders=$PWD/.venv-frameworks
for framework in "$@"; do
  folder=$folders/$framework
  stamp=$("$python" --version && declare -f "install_$framework" && cat scripts/constraints_frameworks.txt)
  stamp=$(cksum <<< "$stamp")
  if [ "$stamp" != "$(cat "$folder/stamp" 2> /dev/null)" ]; then
    echo "Installing $framework into $folder: once, and a minute or less"
    rm -rf "$folder"
    "install_$framework" "$folder"
    echo "$stamp" > "$folder/stamp"
  fi
done
[ $mode != install ] || exit 0

run() { # FRAMEWORK: one after another says what came of it
  local log=$folders/$1.log chosen=() again="bash scripts/frameworks.sh"
  if [ "$mode" = short ]; then
    chosen=(-m short)
    again+=" --short"
  fi
  if LP_FRAMEWORK=$1 PYTHONPATH=$folders/$1 "$python" -m pytest -rP "${chosen[@]}" tests/frameworks/test_"$1"*_run.py \
    > "$log" 2>&1; then
    grep " MiB ours$" "$log" || true # what it said in full stays there
    echo "$1: $(tail -n 1 "$log")"
  else
    cat "$log"
    echo "FAILED: our loss under $1, see above (and $log). By itself: $again $1"
    return 1
  fi
}

# Nothing may be fetched. Only what is imported is compiled, once, which an environment may have forbidden.
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
unset PYTHONDONTWRITEBYTECODE
export folders mode python
export -f run
printf '%s\n' "$@" | xargs -P "${WORKERS:-2}" -n 1 bash -c 'run "$0"' || exit 1
