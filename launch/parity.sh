#!/usr/bin/env bash
# Compare with the reference implementations as users compute: at XLA's default optimization level, which other tests
# lower, and with PyTorch, with which tools/parity must reproduce the stored numbers.
#
#   bash launch/parity.sh           # minutes on two cores; installs the extra "parity" beside "dev"
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
use_environment dev
use_environment parity

export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
files=()
while IFS= read -r file; do
  files+=("$file")
done < <(grep -lE 'import .*\bPARITY\b|helpers\.official_models|importorskip\("torch"\)' -r tests tools/tests --include='test_*.py')
"$python_in_environment" -m pytest --all --optimized "$@" "${files[@]}"
