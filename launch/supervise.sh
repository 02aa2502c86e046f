#!/usr/bin/env bash
# Run a training and restart it after a crash; it resumes from its own checkpoints.
#
#   bash launch/supervise.sh --restarts=10 -- python -m mlmoe_jax.main --config=… --workdir=…
#
# These exit codes end it: 0 and 3 (done), 2 (user error), 4 (the disk is full or read-only), 130 (interrupted, after
# saving a checkpoint), 143 (SIGTERM before there was anything to save). Any other code is a crash.
# SIGTERM is forwarded and ends it too. With --state=FOLDER, the exit code is written to FOLDER/run.exit.
# MLMOE_RESTART_PAUSE sets the pause between two starts in seconds (10).
set -euo pipefail
# shellcheck source=launch/commands.sh
. "$(dirname "$0")/commands.sh"

restarts=10 state=""
while [ $# -gt 0 ]; do
  case "$1" in
    --restarts=*) restarts="${1#*=}" ;;
    --state=*) state="${1#*=}" ;;
    --) break ;;
    *) fail "supervise.sh has no flag $1; write --restarts=N -- COMMAND" ;;
  esac
  shift
done
[[ "$restarts" =~ ^[0-9]+$ ]] || fail "--restarts=$restarts is not a number"
[ $# -gt 1 ] || fail "supervise.sh has nothing to run; write --restarts=N -- COMMAND"
shift

asked="" child=""
pass_on() {
  asked=yes
  [ -z "$child" ] || kill -TERM "$child" 2> /dev/null || true
}
trap pass_on TERM INT

code=0
for ((start = 0; ; start++)); do
  "$@" &
  child=$!
  [ -z "$asked" ] || pass_on
  code=0
  wait_for "$child" || code=$?
  child=""
  case "$code" in 0 | 2 | 3 | 4 | 130 | 143) break ;; esac
  [ -z "$asked" ] || break
  [ "$start" -lt "$restarts" ] || break
  echo "supervise: exit code $code; restart $((start + 1)) of $restarts" >&2
  sleep "${MLMOE_RESTART_PAUSE:-10}" &
  wait $! || true
  if [ -n "$asked" ]; then code=130 && break; fi # between two starts: nothing is running, and the last checkpoint is there
done
echo "supervise: ended with exit code $code" >&2
[ -z "$state" ] || echo "$code" > "$state/run.exit"
exit "$code"
