#!/usr/bin/env bash
# The Ascend kernels without a chip, in an environment of its own: compiled by triton-ascend and by BiShengIR of three CANN
# releases, run on this machine's CPU, and a Trainer on an emulated NPU. Arguments go to pytest.
#   bash scripts/ascend.sh
#   bash scripts/ascend.sh tests/ascend/test_ascend_issues.py -k odd
#   bash scripts/ascend.sh --install              # nothing is run
# WORKERS is the number of test processes (default 2). LLVM19 is the folder of LLVM 19 with mlir-opt (default
# /usr/lib/llvm-19); root installs it there. ASCEND_HOME keeps the environment (default .venv-ascend, 3 GB), ASCEND_PYTHON is a
# Python 3.11 to make it with.
# Nothing is tested, and the script says so, where a package registry does not have what it needs.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${ASCEND_HOME:-.venv-ascend}
folder=$(mkdir -p "$folder" && cd "$folder" && pwd)
llvm=${LLVM19:-/usr/lib/llvm-19}
python=$folder/bin/python
releases="1.0.0 1.1.0 1.2.0" # of ascendnpu-ir, see tests/ascend/ascend_lowering.py

skip() {
  echo "************************************************************************************************"
  echo "NOT TESTED: the Ascend kernels. $*"
  echo "************************************************************************************************"
  exit 0
}

# require NAME VERSIONS...   ends the script with a word where the registry answers and has not all of them.
require() {
  local name=$1 said version
  shift
  said=$("$python" -m pip index versions "$name" 2>&1) || true
  for version in "$@"; do
    if grep -qE "^Available versions:.*\b${version//./\\.}(,|$)" <<< "$said"; then
      continue
    fi
    if ! grep -qE "^Available versions:|No matching distribution found" <<< "$said" ||
      grep -qiE "retrying|timed out|connection" <<< "$said"; then
      echo "$said" >&2
      echo "The package registry could not be asked for $name; pip's own message is above." >&2
      exit 1
    fi
    skip "This machine's package registry has no $name $version."
  done
}

pip_install() {
  if ! "$python" -m pip install -qq --disable-pip-version-check "$@"; then
    echo "Installing $* failed; pip's own message is above. Run the script again when that is mended." >&2
    exit 1
  fi
}

make_environment() {
  local base=${ASCEND_PYTHON:-python3.11} stamp version
  if ! "$base" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' 2> /dev/null; then
    echo "triton-ascend 3.2.0 is published for Python 3.11 at most, and $base is none with venv." \
      "Install it, or name it: ASCEND_PYTHON=/path/to/python3.11 bash $0" >&2
    exit 1
  fi
  stamp=$(cat scripts/ascend.sh scripts/constraints.txt && sed -n "/^dependencies/,/^]/p" pyproject.toml)
  stamp=$(cksum <<< "$stamp")
  if [ "$stamp" = "$(cat "$folder/stamp" 2> /dev/null)" ]; then
    return
  fi
  echo "Installing into $folder: once, and a few minutes"
  rm -rf "$folder/bin" "$folder/lib" "$folder/include" "$folder/stamp"
  "$base" -m venv "$folder"
  require triton-ascend 3.2.0
  # shellcheck disable=SC2086 # a list
  require ascendnpu-ir $releases
  # triton-ascend is Triton there, and wants an older numpy
  grep -vE "^(numpy|triton)==" scripts/constraints.txt > "$folder/constraints.txt"
  echo "numpy<2.4" >> "$folder/constraints.txt"
  pip_install -c "$folder/constraints.txt" torch==2.13.0
  "$python" -m pip uninstall -qq -y triton 2> /dev/null # a build of torch for CUDA brings it, and both share a folder
  pip_install -c "$folder/constraints.txt" triton-ascend==3.2.0 pybind11 "numpy<2.4" ninja setuptools
  pip_install -c "$folder/constraints.txt" -e . pytest pytest-xdist pytest-timeout psutil
  pip_install -c "$folder/constraints.txt" --no-deps liger-kernel
  for version in $releases; do
    if [ ! -d "$folder/ir/$version/ascendnpuir" ]; then
      rm -rf "$folder/ir/$version"
      pip_install --no-deps --target "$folder/ir/$version" "ascendnpu-ir==$version"
    fi
  done
  echo "$stamp" > "$folder/stamp"
}

install_llvm() {
  if [ -x "$llvm/bin/mlir-translate" ] && [ -x "$llvm/bin/llc" ]; then
    return
  fi
  if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null || [ -n "${LLVM19:-}" ]; then
    echo "LLVM 19 with mlir-opt, mlir-translate and llc is not in $llvm. Install mlir-19-tools and llvm-19, or name its" \
      "folder: LLVM19=/path/to/llvm-19 bash $0" >&2
    exit 1
  fi
  apt-get update -qq
  if ! apt-cache show mlir-19-tools llvm-19 > /dev/null 2>&1; then
    skip "apt has no mlir-19-tools and llvm-19 on this machine, which run compiled kernels on the CPU."
  fi
  apt-get install -y -qq --no-install-recommends mlir-19-tools llvm-19 > /dev/null
}

make_environment
install_llvm
[ "${1:-}" != --install ] || exit 0

export TORCH_DEVICE_BACKEND_AUTOLOAD=0 TRITON_INTERPRET=0 # CANN is not here; kernels are compiled
export LP_ASCEND_IR=$folder/ir LP_ASCEND_CACHE=$folder/cache TRITON_CACHE_DIR=$folder/cache/triton LLVM19=$llvm
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false MPLBACKEND=Agg
export PATH=$folder/bin:$PATH
if [ $# -eq 0 ]; then
  set -- tests/ascend
fi
exec "$python" -m pytest -n "${WORKERS:-2}" --dist loadgroup "$@"
