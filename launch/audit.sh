#!/usr/bin/env bash
# Look up known vulnerabilities of the locked packages; needs the network and is no part of the tests.
#
#   bash launch/audit.sh            # locks/base.lock
#   bash launch/audit.sh tpu        # locks/tpu.lock
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
choose_python
tools="$(mktemp -d)"
trap 'rm -rf "$tools"' EXIT
"$python" -m venv "$tools"
"$tools/bin/python" -m pip install --quiet --disable-pip-version-check pip-audit
"$tools/bin/pip-audit" --require-hashes --disable-pip --requirement="locks/${1:-base}.lock"
