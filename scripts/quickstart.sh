#!/usr/bin/env bash
# From nothing to a trained model: makes .venv, installs this project into it, and trains a small Llama once with each
# strategy. Arguments override keys of configs/quickstart.yaml:
#   bash scripts/quickstart.sh --max_steps 20 --strategies naive cce
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

environment .venv "" -e ".[quickstart]"

# On a busy machine, threads that wait by spinning take the cores from those that compute.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
exec "$python" -m loss_plugins train configs/quickstart.yaml "$@"
