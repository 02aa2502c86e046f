#!/usr/bin/env bash
# Write the lock files: every package that the program needs, in one version with its sha256, for Python 3.11 and newer
# on every platform. To install one: pip install --require-hashes -r locks/base.lock
#
#   bash locks/make.sh              # keep the versions that still fit
#   bash locks/make.sh --upgrade    # take the newest
#
# base.lock has the packages of requirements.txt, tpu.lock, cuda.lock and serve.lock also those of the extra of this name,
# and uv.lock only uv itself, which makes these files and installs Python on TPU machines.
set -euo pipefail
cd "$(dirname "$0")/.."

lock() {
  local name="$1"
  shift
  uv pip compile - --output-file="locks/$name.lock" --universal --python-version=3.11 --generate-hashes --no-annotate \
    --custom-compile-command="bash locks/make.sh" --quiet "$@"
}

extra() {
  python3 - "$1" <<'PY'
import sys, tomllib
print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]]))
PY
}

lock base "$@" < requirements.txt
for name in tpu cuda serve; do
  { cat requirements.txt && extra "$name"; } | lock "$name" "$@"
done
echo uv | lock uv "$@"
