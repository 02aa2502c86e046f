#!/usr/bin/env bash
# The part of tpu_vm.sh that runs on each worker of the slice. It uses one folder:
#
#   mlmoe/code        the latest code
#   mlmoe/venv        the environment, with its own Python
#   mlmoe/run.log     the output of the training; run.pid and run.exit hold its state
#
#   worker.sh install                        replace the code by the version just unpacked
#   worker.sh setup                          create the environment, or reuse it
#   worker.sh start [--restarts=N] -- FLAG…  train, detached from this shell
#   worker.sh logs | status | stop
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
# shellcheck source=launch/commands.sh
. "$here/commands.sh"
root="$(cd "$here/../.." && pwd)"

running() {
  [ -f "$root/run.pid" ] && kill -0 "$(cat "$root/run.pid")" 2> /dev/null
}

install() {
  ! running || fail "a training is running on $(hostname); stop it before replacing its code"
  rm -rf "$root/code"
  mv "$root/incoming" "$root/code"
}

# The TPU images are Ubuntu 22.04, which has only Python 3.10; uv installs a newer Python without changing the system. pip
# checks the sha256 of uv, uv checks the sha256 of Python, and pip checks the sha256 of all packages.
setup() {
  export PATH="$HOME/.local/bin:$PATH"
  command -v uv > /dev/null ||
    python3 -m pip install --user --quiet --disable-pip-version-check --require-hashes -r "$root/code/locks/uv.lock"
  uv python install 3.12
  PYTHON="$(uv python find 3.12)"
  export PYTHON MLMOE_VENV="$root/venv" MLMOE_LOCKED=1
  cd "$root/code"
  . launch/environment.sh
  use_environment tpu
}

start() {
  local restarts="$1"
  shift
  ! running || fail "a training is already running on $(hostname); see its logs, or stop it first"
  [ -x "$root/venv/bin/python" ] || fail "$(hostname) has no environment yet; run setup first"
  rm -f "$root/run.exit"
  cd "$root/code"
  # A separate session, which gets no signal when the ssh connection is lost.
  setsid bash launch/supervise.sh --restarts="$restarts" --state="$root" -- \
    "$root/venv/bin/python" -m mlmoe_jax.main "$@" >> "$root/run.log" 2>&1 < /dev/null &
  echo $! > "$root/run.pid"
  echo "training on $(hostname)"
}

# Follow the log until the training ends, and exit with its exit code.
logs() {
  [ -f "$root/run.log" ] || fail "no training has been started on $(hostname) yet"
  tail --pid="$(cat "$root/run.pid")" --sleep-interval=0.2 -n 200 -f "$root/run.log"
  [ -f "$root/run.exit" ] || fail "the training on $(hostname) was killed; \"run\" resumes from its last checkpoint"
  exit "$(cat "$root/run.exit")"
}

status() {
  local now="not started yet"
  if running; then
    now="training; $(tail -n 1 "$root/run.log" | tr '\r' '\n' | tail -n 1)"
  elif [ -f "$root/run.exit" ]; then
    now="ended with exit code $(cat "$root/run.exit")"
  elif [ -f "$root/run.log" ]; then
    now="was killed"
  fi
  echo "$(hostname): $now"
}

stop() {
  ! running || kill -TERM "$(cat "$root/run.pid")"
  while running; do sleep 0.2; done
  status
}

action="${1:-}" restarts=10
shift || true
case "${1:-}" in --restarts=*) restarts="${1#*=}" && shift ;; esac
[ "${1:-}" != -- ] || shift
case "$action" in
  install | setup | logs | status | stop) "$action" ;;
  start) start "$restarts" "$@" ;;
  *) fail "worker.sh has no action \"$action\"; choose from: install setup start logs status stop" ;;
esac
