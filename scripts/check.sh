#!/usr/bin/env bash
# Lint, format, types and import contracts, with the tools of the environment in $1 (default: those on PATH).
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${1:+$1/bin/}
set -x
"${bin}ruff" check .
"${bin}ruff" format --check .
"${bin}mypy"
"${bin}lint-imports" --no-logo
