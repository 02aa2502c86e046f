# Creates the project's own Python environment, or reuses it if it matches; the launch scripts source this file.
#
#   use_environment            with the packages of requirements.txt
#   use_environment dev        also with the packages of the extra "dev" in pyproject.toml
#
# MLMOE_LOCKED=1 installs the versions of locks/base.lock, or locks/EXTRA.lock, and compares each file with its sha256.
# MLMOE_VENV overrides the folder .venv; PYTHON overrides the interpreter, by default the first suitable interpreter on the PATH.

is_suitable() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    is_suitable "$PYTHON" || { echo "error: PYTHON=$PYTHON is no Python 3.11 or newer; set another" >&2; exit 2; }
    echo "$PYTHON"
    return
  fi
  for candidate in python3 python3.13 python3.12 python3.11 python; do
    if is_suitable "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  echo "error: no Python 3.11 or newer is on the PATH; install one, or set PYTHON=/path/to/python3" >&2
  exit 2
}

# Creates the environment $1 of the interpreter $2, unless it exists; replaces only an environment of this script.
make_environment() {
  local version
  version="$("$2" --version)"
  if [ ! -x "$1/bin/python" ]; then
    "$2" -m venv "$1"
  elif [ "$("$1/bin/python" --version)" != "$version" ]; then
    ls "$1"/made-from*.txt > /dev/null 2>&1 ||
      { echo "error: $1 is not of $version; set MLMOE_VENV to another folder, or PYTHON to its interpreter" >&2; exit 2; }
    "$2" -m venv --clear "$1"
  fi
}

use_environment() {
  local extra="${1:-}" venv="${MLMOE_VENV:-.venv}" python expected stamp lock=
  python="$(find_python)" || exit 2
  expected="$("$python" --version; cat requirements.txt; [ -z "$extra" ] || cat pyproject.toml)"
  if [ -n "${MLMOE_LOCKED:-}" ]; then
    lock="locks/${extra:-base}.lock"
    [ -f "$lock" ] || { echo "error: there is no $lock; unset MLMOE_LOCKED" >&2; exit 2; }
    expected="$("$python" --version; cat "$lock")"
  fi
  stamp="$venv/made-from${extra:+-$extra}.txt"
  if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$expected" ]; then
    echo "setting up $venv (once; needs the network) ..." >&2
    make_environment "$venv" "$python"
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
      # It asks for an older orbax-checkpoint than requirements.txt, which the export to ONNX does not use.
      [ "$extra" != dev ] || "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps jax2onnx
    fi
    printf '%s\n' "$expected" > "$stamp"
  fi
  python_in_environment="$venv/bin/python"
}
