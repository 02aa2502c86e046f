#!/usr/bin/env bash
# Train on a Cloud TPU slice of any size; needs only the gcloud command.
#
#   bash launch/tpu_vm.sh ACTION… --name=NAME --zone=ZONE [FLAG…] [-- FLAGS OF mlmoe_jax.main]
#
# Actions, which run in the given order:
#   up       create the slice, or reuse it; a preempted slice is deleted and created again
#   sync     send the files tracked by git to all workers, including uncommitted changes
#   setup    install Python and the environment on every worker (once, and after a change of requirements)
#   run      train on all workers; survives a lost connection and restarts after a crash
#   logs     follow the output of a worker until the training ends, and exit with its exit code
#   status   print the state of the slice and of the training on each worker
#   stop     let the training save a checkpoint and end
#   down     delete the slice
#
# Flags:
#   --name=NAME  --zone=ZONE   which slice
#   --project=PROJECT          project, by default as set in gcloud
#   --type=TYPE                up: type of the slice, such as v5litepod-16, v6e-256, v5p-8, v4-32
#   --runtime=VERSION          up: image, by default the usual image of the type
#   --spot                     up: cheaper capacity that can be preempted
#   --queued                   up: wait in the queue for capacity (a queued resource); pass it to "down" as well
#   --internal-ip              connect to the addresses inside the network
#   --worker=N                 logs: number of the worker (0), or "all"
#   --restarts=N               run: restart after at most N crashes (10)
#   --yes                      down: do not ask for confirmation
#   --dry-run                  print every command and run none
set -euo pipefail
# shellcheck source=launch/commands.sh
. "$(dirname "$0")/commands.sh"
flag_name="" flag_zone="" flag_project="" flag_type="" flag_runtime="" flag_worker=0 flag_restarts=10
flag_spot="" flag_queued="" flag_internal_ip="" flag_dry_run=""
read_command "up sync setup run logs status stop down" "name zone project type runtime worker restarts" \
  "spot queued internal-ip yes dry-run" "$@"
cd "$(dirname "$0")/.."

require_form name '[a-z]([-a-z0-9]{0,61}[a-z0-9])?' my-slice
require_form zone '[a-z]+-[a-z]+[0-9]+-[a-z]' us-west4-a
[ -z "$flag_project" ] || require_form project '[a-z][-a-z0-9.:]+' my-project
[ -z "$flag_type" ] || require_form type 'v[0-9]+[a-z]*-[0-9]+' v5litepod-16
require_form worker '[0-9]+|all' all
require_form restarts '[0-9]+' 10
need gcloud "the Google Cloud CLI, https://cloud.google.com/sdk/docs/install"

place=("--zone=$flag_zone" ${flag_project:+"--project=$flag_project"})

# ------------------------------------------------------------------------------------------------- the slice
# The default image of each generation: https://cloud.google.com/tpu/docs/runtimes
usual_runtime() {
  case "$flag_type" in
    v6e-*) echo v2-alpha-tpuv6e ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v2-* | v3-* | v4-*) echo tpu-ubuntu2204-base ;;
    *) fail "there is no default image for --type=$flag_type; choose one with --runtime=VERSION" ;;
  esac
}

tpu() {
  local group="$1" action="$2"
  shift 2
  call gcloud compute tpus "$group" "$action" "$flag_name" "${place[@]}" "$@"
}

# Set `state` to the state of the slice, "" if there is none; a dry run sets it to the first argument.
read_state() {
  local group=tpu-vm format='value(acceleratorType,state)' type
  if [ -n "$flag_queued" ]; then
    group=queued-resources format='value(tpu.nodeSpec[0].node.acceleratorType,state.state)'
  fi
  if [ -n "$flag_dry_run" ]; then
    tpu "$group" describe "--format=$format"
    state="$1"
  elif state="$(tpu "$group" describe "--format=$format" 2>&1)"; then
    state="${state##*$'\n'}" type="${state%%$'\t'*}" state="${state##*$'\t'}"
    if [ -n "$type" ] && [ -n "$flag_type" ] && [ "$type" != "$flag_type" ]; then
      fail "$flag_name exists as a $type; choose another --name, or delete it first with \"down\""
    fi
  else
    [[ "$state" == *NOT_FOUND* ]] || fail "gcloud cannot describe $flag_name: ${state//$'\n'/ }"
    state=""
  fi
}

up() {
  local state=""
  read_state ""
  case "$state" in
    "") create ;;
    PREEMPTED | TERMINATED | FAILED | SUSPENDED) delete && create ;;
    STOPPED) tpu tpu-vm start || fail "gcloud could not start $flag_name; its message is above" ;;
  esac
  read_state READY
  until [ "$state" = READY ] || [ "$state" = ACTIVE ]; do
    case "$state" in
      "" | PREEMPTED | TERMINATED | FAILED | SUSPENDED) fail "$flag_name was not created (${state:-not found}); try again" ;;
    esac
    echo "$flag_name: $state" >&2
    sleep "${MLMOE_POLL:-15}"
    read_state READY
  done
}

create() {
  require_form type '.+' v5litepod-16
  local runtime="$flag_runtime"
  [ -n "$runtime" ] || runtime="$(usual_runtime)" || exit 2
  if [ -n "$flag_queued" ]; then
    tpu queued-resources create "--node-id=$flag_name" "--accelerator-type=$flag_type" \
      "--runtime-version=$runtime" ${flag_spot:+--spot}
  else
    tpu tpu-vm create "--accelerator-type=$flag_type" "--version=$runtime" ${flag_spot:+--spot}
  fi || fail "gcloud could not create $flag_name; its message is above, and --queued waits for capacity"
}

delete() {
  if [ -n "$flag_queued" ]; then
    tpu queued-resources delete --force --quiet
  else
    tpu tpu-vm delete --quiet
  fi || fail "gcloud could not delete $flag_name; its message is above"
}

down() {
  agree "Delete $flag_name in $flag_zone?"
  delete
}

# ----------------------------------------------------------------------------------------------- the workers
on_workers() {
  tpu tpu-vm ssh "--worker=$1" ${flag_internal_ip:+--internal-ip} "--command=$2"
}

on_all() {
  on_workers all "$2" || fail "$1 failed on a worker of $flag_name; its message is above"
}

sync() {
  local archive=build/code.tgz pack='git ls-files -z | COPYFILE_DISABLE=1 tar -czf build/code.tgz --null -T -'
  if [ -n "$flag_dry_run" ]; then
    echo "$pack"
  else
    mkdir -p build
    bash -o pipefail -c "$pack" || fail "cannot pack the files tracked by git; \"git status\" lists missing ones"
  fi
  call gcloud compute tpus tpu-vm scp "$archive" "$flag_name:mlmoe-code.tgz" "${place[@]}" --worker=all \
    ${flag_internal_ip:+--internal-ip} || fail "sending the code to $flag_name failed; gcloud's message is above"
  on_all sync "rm -rf mlmoe/incoming && mkdir -p mlmoe/incoming && tar -xzf mlmoe-code.tgz -C mlmoe/incoming && \
bash mlmoe/incoming/launch/worker.sh install"
}

worker="bash mlmoe/code/launch/worker.sh"
for action in "${actions[@]}"; do
  case "$action" in
    up | sync | down) "$action" ;;
    setup | stop) on_all "$action" "$worker $action" ;;
    run)
      [ ${#program[@]} -gt 0 ] || fail "run needs the flags of mlmoe_jax.main; write them after --"
      on_all run "$worker start --restarts=$flag_restarts -- $(quoted "${program[@]}")"
      ;;
    logs) on_workers "$flag_worker" "$worker logs" || exit $? ;;
    status)
      tpu tpu-vm describe "--format=value(state)" || fail "gcloud cannot describe $flag_name; its message is above"
      on_all status "$worker status"
      ;;
  esac
done
