#!/usr/bin/env bash
# Set up an environment and run the tests.
#
#   bash launch/test.sh            # minutes on two cores
#   bash launch/test.sh --all      # including the slow tests
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
use_environment dev

export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
unset PYTHONDONTWRITEBYTECODE  # or each process would compile the sources and rewrite all assertions again
"$python_in_environment" -m ruff check .
"$python_in_environment" -m ruff format --check --quiet .
if [[ " $* " == *" --all "* ]]; then  # tree mode may become Flax's default, so the models must work in it
  NNX_GRAPH_MODE=false NNX_GRAPH_UPDATES=false "$python_in_environment" -m pytest -n 2 --dist loadfile tests/models
fi
# Keep the order of the files: the slowest have few tests and would otherwise run last, with one worker idle. A worker
# that crashes ends the run: replaced, it has been seen to leave the other one waiting forever.
"$python_in_environment" -m pytest -n 2 --max-worker-restart=0 --dist loadfile --no-loadscope-reorder "$@"
