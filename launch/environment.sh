# Creates the project's own Python environment, or reuses it if it matches; the launch scripts source this file.
#
#   use_environment            with the packages of requirements.txt
#   use_environment dev        also with the packages of the extra "dev" in pyproject.toml
#
# MLMOE_LOCKED=1 installs the versions of locks/base.lock, or locks/EXTRA.lock, and compares each file with its sha256.
# MLMOE_VENV overrides the folder .venv. PYTHON is the interpreter. Without it, an environment that exists keeps its own, and a new
# one gets the newest on the PATH.

python=""

# is_suitable PYTHON MODULES: whether it runs, is new enough and has the modules. A name on the PATH need not run: pyenv has one for
# each version that any project uses. Debian's Python lacks ensurepip without the package python3-venv.
is_suitable() {
  "$1" -c "import sys, $2; sys.exit(sys.version_info < (3, 11))" > /dev/null 2>&1
}

# Sets $python, and prints which interpreter it is and why.
choose_python() {
  local candidate reason skipped="" venv="${MLMOE_VENV:-.venv}" needed="ctypes, ensurepip, ssl, venv"
  if [ -n "${PYTHON:-}" ]; then
    is_suitable "$PYTHON" "$needed" ||
      { echo "error: PYTHON=$PYTHON does not run as Python 3.11 or newer with venv and ensurepip; set another" >&2; exit 2; }
    python="$PYTHON" reason="set by PYTHON"
  elif is_suitable "$venv/bin/python" pip; then
    python="$venv/bin/python" reason="the environment exists; PYTHON=python3.13, for example, orders another"
  else
    for candidate in python3.13 python3.12 python3.11 python3 python; do
      if is_suitable "$candidate" "$needed"; then
        python="$candidate" reason="the newest on the PATH that runs"
        break
      elif command -v "$candidate" > /dev/null; then
        skipped="$skipped $candidate"
      fi
    done
    [ -n "$python" ] ||
      { echo "error: no Python 3.11 or newer with venv and ensurepip is on the PATH; install one, or set PYTHON=/path/to/python3" >&2; exit 2; }
    [ -z "$skipped" ] || reason="$reason; not suitable:$skipped"
  fi
  echo "$("$python" --version), $python: $reason" >&2
  case "$("$python" --version)" in
    "Python 3.11."*) echo "Python 3.12 or newer has a newer JAX, which is faster on a CPU, in bfloat16 nearly twice (docs/performance.md)" >&2 ;;
  esac
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
    echo "replacing $1, which a launch script made of another Python" >&2
    "$2" -m venv --clear "$1"
  fi
}

use_environment() {
  local extra="${1:-}" venv="${MLMOE_VENV:-.venv}" expected stamp lock=
  [ -n "$python" ] || choose_python
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
