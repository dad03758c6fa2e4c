#!/usr/bin/env bash
# Lint, format, types and import contracts.
set -euxo pipefail
cd "$(dirname "$0")/.."
ruff check .
ruff format --check .
mypy
lint-imports
