#!/usr/bin/env bash
# Run a training and restart it after a crash or a hang; it resumes from its own checkpoints.
#
#   bash launch/supervise.sh --restarts=10 -- python -m mlmoe_jax.main --config=… --workdir=…
#
# These exit codes end it: 0 and 3 (done), 2 (user error), 4 (the disk is full or read-only), 130 (interrupted, after
# saving a checkpoint), 143 (SIGTERM before there was anything to save). Any other code is a crash.
# The program touches the file MLMOE_HEARTBEAT at every step. If it does not for MLMOE_HANG_SECONDS (900; 0 = no limit),
# it hangs: it is ended with SIGTERM, after half a minute with SIGKILL, and restarted.
# SIGTERM is forwarded and ends it too. With --state=FOLDER, the exit code is written to FOLDER/run.exit.
# MLMOE_RESTART_PAUSE sets the pause between two starts in seconds (10).
set -euo pipefail
# shellcheck source=launch/commands.sh
. "$(dirname "$0")/commands.sh"

restarts=10 state="" limit="${MLMOE_HANG_SECONDS:-900}"
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
[[ "$limit" =~ ^[0-9]+$ ]] || fail "MLMOE_HANG_SECONDS=$limit is not a number"
[ $# -gt 1 ] || fail "supervise.sh has nothing to run; write --restarts=N -- COMMAND"
shift

# On several machines, the file on this machine is enough: if one process hangs, all wait and none touches the file.
MLMOE_HEARTBEAT="$(mktemp)"
export MLMOE_HEARTBEAT
seen="$(mktemp)"
trap 'rm -f "$MLMOE_HEARTBEAT" "$seen"' EXIT

watch() { # end process $1 and its group when its heartbeat stops; the file $seen is then gone
  local quiet=0 pause=$((limit < 100 ? 1 : 10))
  while sleep "$pause"; do
    quiet=$((quiet + pause)) # wake-ups and not the clock: a suspended machine does not hang
    [ ! "$MLMOE_HEARTBEAT" -nt "$seen" ] || quiet=0
    touch -r "$MLMOE_HEARTBEAT" "$seen"
    [ "$quiet" -lt "$limit" ] || break
  done
  echo "supervise: no step has ended for $limit s; the program hangs and is ended" >&2
  rm -f "$seen"
  kill -TERM "$1"
  sleep "${MLMOE_GRACE_SECONDS:-30}"
  kill -TERM "$1" # at the second SIGTERM, launch/multiprocess.sh kills its processes
  sleep 2
  kill -KILL -- "-$1"
}

stopping="" child=""
forward() {
  stopping=yes
  [ -z "$child" ] || kill -TERM "$child" 2> /dev/null || true
}
trap forward TERM INT
set -m # each job in its own process group

code=0
for ((start = 0; ; start++)); do
  touch "$MLMOE_HEARTBEAT" "$seen"
  "$@" &
  child=$!
  [ -z "$stopping" ] || forward
  watcher=""
  if [ "$limit" -gt 0 ]; then watch "$child" & watcher=$!; fi
  code=0
  wait_for "$child" || code=$?
  child=""
  [ -e "$seen" ] || code=75 # it hung
  if [ -n "$watcher" ]; then { kill -KILL -- "-$watcher" && wait "$watcher"; } 2> /dev/null || true; fi
  case "$code" in 0 | 2 | 3 | 4 | 130 | 143) break ;; esac
  [ -z "$stopping" ] || break
  [ "$start" -lt "$restarts" ] || break
  echo "supervise: exit code $code; restart $((start + 1)) of $restarts" >&2
  sleep "${MLMOE_RESTART_PAUSE:-10}" &
  wait $! || true
  if [ -n "$stopping" ]; then code=130 && break; fi # between two starts: nothing runs, and the last checkpoint is complete
done
echo "supervise: ended with exit code $code" >&2
[ -z "$state" ] || echo "$code" > "$state/run.exit"
exit "$code"
