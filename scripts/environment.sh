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

environment() {
  local folder=$1 wheels=$2 base stamp
  shift 2
  base=$(find_python)
  stamp=$({ "$base" --version && echo "$wheels $*" && cat pyproject.toml scripts/constraints.txt scripts/environment.sh; } | cksum)
  python=$folder/bin/python
  if [ "$stamp" = "$(cat "$folder/stamp" 2> /dev/null)" ]; then
    return
  fi
  echo "Installing into $folder (a few minutes, once)"
  rm -rf "$folder"
  "$base" -m venv "$folder"
  local install=("$python" -m pip install -qq --disable-pip-version-check -c scripts/constraints.txt)
  "${install[@]}" --upgrade pip # dependency groups need 25.1
  # torch alone first, so that nothing else chooses its build
  "${install[@]}" torch
  if [ -n "$wheels" ]; then
    # shellcheck disable=SC2086 # a list of names
    "${install[@]}" --no-deps $wheels
  fi
  "${install[@]}" "$@"
  echo "$stamp" > "$folder/stamp"
}
