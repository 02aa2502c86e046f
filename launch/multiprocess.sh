#!/usr/bin/env bash
# Run one job in N processes on this machine, for example one per GPU, or to simulate several hosts.
#
#   bash launch/multiprocess.sh 2 --config=configs/mlvpt_digits.py --workdir=runs/digits
#
# Each output line is prefixed with the number of its process. When a process fails, all processes end, except workers on
# parts (docs/corpus.md); the exit code is from the first failure. Ctrl-C and SIGTERM are forwarded to all processes, which
# save a checkpoint and stop. The same command, also with another N, resumes from the last checkpoint. GPUs are divided
# equally.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=launch/commands.sh
. launch/commands.sh
# shellcheck source=launch/environment.sh
. launch/environment.sh

[[ "${1:-}" =~ ^[1-9][0-9]*$ ]] || fail "\"${1:-}\" is not a number of processes; write launch/multiprocess.sh N --config=…"
count=$1
shift
# shellcheck disable=SC2119
use_environment
grace=${MLMOE_GRACE_SECONDS:-30} # from the first failure to SIGTERM, and then to SIGKILL: time for all processes to print a reason

port="$("$python_in_environment" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')"
export MLMOE_COORDINATOR="127.0.0.1:$port" MLMOE_PROCESSES="$count"
listed="${CUDA_VISIBLE_DEVICES-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd, - || true)}"
IFS=, read -ra gpus <<< "$listed"
share=$((${#gpus[@]} / count))

endings="$(mktemp -u)" # a pipe with a line "number code" for each process that has ended
mkfifo "$endings"
exec 3<> "$endings"
rm "$endings"

work() { # run process $1 with the flags that follow
  trap : INT TERM # the shell outlives the process, to report its exit code
  local number=$1 code=0
  shift
  if [ "$share" -gt 0 ]; then
    CUDA_VISIBLE_DEVICES="$(IFS=,; echo "${gpus[*]:$((number * share)):$share}")"
    export CUDA_VISIBLE_DEVICES
  fi
  MLMOE_PROCESS=$number "$python_in_environment" -m mlmoe_jax.main "$@" 3>&- || code=$?
  echo "$number $code" >&3
}

mark() { # prefix the lines of process $1 until it ends
  trap '' INT TERM
  local line
  while IFS= read -r line || [ -n "$line" ]; do printf '[%s] %s\n' "$1" "$line"; done
}

# With job control, each process has its own group, so Ctrl-C reaches it once, through this script.
set -m
jobs=()
tell() { local job; for job in "${jobs[@]}"; do kill "-$1" -- "-$job" 2>/dev/null || true; done; }
trap 'tell INT' INT
stopping=""
trap 'if [ -z "$stopping" ]; then stopping=yes; tell TERM; else tell KILL; running=0 failed=137; fi' TERM # the second: a process hangs
for ((number = 0; number < count; number++)); do
  { { work "$number" "$@" 2>&1 >&4 4>&- | mark "$number" >&2; } 4>&1 | mark "$number"; } &
  jobs+=($!)
done

failed=0 running=$count terminated="" since=0
while [ "$running" -gt 0 ]; do
  if read -r -t 1 -u 3 number code; then
    running=$((running - 1))
    if [ "$code" -ne 0 ] && [ "$failed" -eq 0 ]; then
      failed=$code since=$SECONDS
      echo "process $number ended with exit code $code" >&2
    fi
  fi
  if [ "$failed" -eq 0 ] || { [ -z "$stopping" ] && writes_parts "$@"; }; then continue; fi
  if [ -z "$terminated" ] && [ $((SECONDS - since)) -ge "$grace" ]; then
    terminated=yes
    tell TERM
  elif [ $((SECONDS - since)) -ge $((2 * grace)) ]; then
    tell KILL
    break
  fi
done
wait || true # for the last lines
exit "$failed"
