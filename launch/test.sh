#!/usr/bin/env bash
# Set up and run the tests.
#
#   bash launch/test.sh            # minutes on two cores
#   bash launch/test.sh --all      # with the slow checks
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
use_environment dev

export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
"$python_in_environment" -m ruff check .
"$python_in_environment" -m ruff format --check --quiet .
# Flax may make tree mode its default: the models have to work in it. With --all every test of them, else one head.
in_tree_mode=(tests/models/test_linear_head.py)
[[ " $* " != *" --all "* ]] || in_tree_mode=(tests/models)
NNX_GRAPH_MODE=false NNX_GRAPH_UPDATES=false "$python_in_environment" -m pytest -n 2 --dist loadfile "${in_tree_mode[@]}"
# In the order of the files: the longest ones have few tests and would otherwise come last, one worker waiting.
"$python_in_environment" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
