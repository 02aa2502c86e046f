# Creates the project's own Python environment, or reuses one that matches; sourced by the other scripts.
#
#   use_environment            with the packages of requirements.txt
#   use_environment dev        also with those of the extra "dev" in pyproject.toml
#
# MLMOE_LOCKED=1 installs the versions of locks/base.lock, or locks/EXTRA.lock, and compares each file with its sha256.
# MLMOE_VENV overrides the folder .venv; PYTHON overrides the interpreter, by default the first suitable one on the PATH.

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "error: no Python 3.11 or newer is on the PATH; install one, or set PYTHON=/path/to/python3" >&2
  exit 2
}

use_environment() {
  local extra="${1:-}" venv="${MLMOE_VENV:-.venv}" python wanted stamp lock=
  python="$(find_python)" || exit 2
  wanted="$("$python" --version; cat requirements.txt; [ -z "$extra" ] || cat pyproject.toml)"
  if [ -n "${MLMOE_LOCKED:-}" ]; then
    lock="locks/${extra:-base}.lock"
    [ -f "$lock" ] || { echo "error: there is no $lock; unset MLMOE_LOCKED" >&2; exit 2; }
    wanted="$("$python" --version; cat "$lock")"
  fi
  stamp="$venv/made-from${extra:+-$extra}.txt"
  if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
    echo "setting up $venv (once; needs the network) ..." >&2
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    if [ -n "$lock" ]; then
      "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r "$lock"
    else
      "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r requirements.txt
    fi
    if [ -n "$extra" ] && [ -z "$lock" ]; then
      "$venv/bin/python" - "$extra" > "$venv/$extra.txt" <<'PY'
import sys, tomllib
print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]]))
PY
      "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$venv/$extra.txt"
    fi
    printf '%s\n' "$wanted" > "$stamp"
  fi
  python_in_environment="$venv/bin/python"
}
