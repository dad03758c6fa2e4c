#!/usr/bin/env bash
# From nothing to a trained model: makes .venv, installs this project into it, and trains a small Llama once with each
# strategy. Arguments override keys of configs/quickstart.yaml:
#   bash scripts/quickstart.sh --max_steps 20 --strategies naive cce
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

failed() {
  echo "The installation failed; pip's own message is above. Often there is no network, or the disk is full." \
    "Run this script again when that is mended." >&2
  exit 1
}
trap failed ERR
environment .venv "" -e ".[quickstart]"
trap - ERR

exec "$python" -m loss_plugins train configs/quickstart.yaml "$@"
