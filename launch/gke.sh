#!/usr/bin/env bash
# Train on a TPU slice of a GKE cluster with JobSet; docs/scaling.md explains how to create one.
#
#   bash launch/gke.sh ACTION… --name=NAME [FLAG…] [-- FLAGS OF mlmoe_jax.main]
#
# Actions, which run in the given order:
#   pool     add a node pool for the slice to a Standard cluster (Autopilot and xpk create their own)
#   image    build the image and push it
#   render   print the manifest
#   run      start the training; delete an earlier JobSet with this name first (its checkpoints are kept)
#   logs     follow the output of the first host
#   status   list the JobSet and its pods
#   down     let the training save a checkpoint and end, and delete the JobSet
#
# Flags:
#   --name=NAME            name of the JobSet and of the node pool
#   --tpu=v5e              generation: v4, v5e, v5p or v6e
#   --topology=16x16       topology of the slice; three numbers, such as 4x4x8, for v4 and v5p
#   --image=IMAGE          such as REGION-docker.pkg.dev/PROJECT/REPOSITORY/mlmoe:1
#   --cluster=CLUSTER      pool: name of the cluster
#   --location=REGION      pool: region or zone of the cluster
#   --project=PROJECT      pool: project, by default as set in gcloud
#   --account=NAME         Kubernetes service account with access to the bucket (default)
#   --restarts=N           restart all pods after at most N failures or lost machines (10)
#   --spot                 capacity that can be preempted
#   --yes                  down: do not ask for confirmation
#   --dry-run              print every command and run none; "render" shows what "run" sends
set -euo pipefail
# shellcheck source=launch/commands.sh
. "$(dirname "$0")/commands.sh"
flag_name="" flag_tpu="" flag_topology="" flag_image="" flag_cluster="" flag_location="" flag_project=""
flag_account=default flag_restarts=10 flag_spot=""
read_command "pool image render run logs status down" \
  "name tpu topology image cluster location project account restarts" "spot yes dry-run" "$@"
cd "$(dirname "$0")/.."
# JobSet appends "-slice-0-" and the number of the pod; the result may have at most 63 characters.
require_form name '[a-z]([-a-z0-9]{0,38}[a-z0-9])?' my-run
require_form account '[a-z0-9]([-a-z0-9.]*[a-z0-9])?' trainer
require_form restarts '[0-9]+' 10

# Set GKE's names for the slice: https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus
describe_slice() {
  local machine_family example axes dimension total=1
  require_form tpu '[a-z0-9]+' v5e
  require_form topology '[0-9]+x[0-9]+(x[0-9]+)?' 16x16
  case "$flag_tpu" in
    v4) accelerator=tpu-v4-podslice machine_family=ct4p-hightpu example=4x4x4 ;;
    v5e) accelerator=tpu-v5-lite-podslice machine_family=ct5lp-hightpu example=4x4 ;;
    v5p) accelerator=tpu-v5p-slice machine_family=ct5p-hightpu example=4x4x4 ;;
    v6e) accelerator=tpu-v6e-slice machine_family=ct6e-standard example=4x4 ;;
    *) fail "--tpu=$flag_tpu is not one of v4, v5e, v5p, v6e" ;;
  esac
  axes="${flag_topology//[!x]/}"
  [ "$axes" = "${example//[!x]/}" ] || fail "--topology=$flag_topology is not a topology of $flag_tpu; for example, write $example"
  for dimension in ${flag_topology//x/ }; do total=$((total * 10#$dimension)); done
  chips=4
  [ "$flag_topology" != 1x1 ] || chips=1
  if [ "$total" -eq 0 ] || [ $((total % chips)) -ne 0 ]; then
    fail "--topology=$flag_topology has $total chips; choose a topology whose number of chips is a multiple of $chips"
  fi
  hosts=$((total / chips))
  machine="$machine_family-${chips}t"
}

pool() {
  describe_slice
  require_form cluster '[a-z][-a-z0-9]*' my-cluster
  require_form location '[a-z]+-[a-z]+[0-9]+(-[a-z])?' us-west4-a
  [ -z "$flag_project" ] || require_form project '[a-z][-a-z0-9.:]+' my-project
  need gcloud "the Google Cloud CLI, https://cloud.google.com/sdk/docs/install"
  # Only slices of several machines have a placement.
  local placement=()
  [ "$hosts" -eq 1 ] || placement=("--tpu-topology=$flag_topology")
  call gcloud container node-pools create "$flag_name" "--cluster=$flag_cluster" "--location=$flag_location" \
    ${flag_project:+"--project=$flag_project"} "--machine-type=$machine" ${placement[@]+"${placement[@]}"} \
    "--num-nodes=$hosts" ${flag_spot:+--spot} || fail "gcloud could not create the node pool; its message is above"
}

image() {
  require_image
  need docker "Docker, https://docs.docker.com/engine/install"
  call docker build --platform=linux/amd64 --file=launch/Dockerfile "--tag=$flag_image" . ||
    fail "docker could not build the image; its message is above"
  call docker push "$flag_image" || fail "docker could not push the image; its message is above"
}

require_image() {
  require_form image '[A-Za-z0-9][A-Za-z0-9._/:@-]+' us-docker.pkg.dev/my-project/my-repository/mlmoe:1
}

# Print the manifest with all placeholders filled in.
render() {
  local word arguments="" keep=(-e '/# spot only$/d')
  describe_slice
  require_image
  [ ${#program[@]} -gt 0 ] || fail "the training needs the flags of mlmoe_jax.main; write them after --"
  for word in "${program[@]}"; do
    [[ "$word" != *[[:cntrl:]]* ]] || fail "a flag after -- contains a line break or another control character; remove it"
    arguments="$arguments, \"$(printf '%s' "$word" | sed 's/[\\"]/\\&/g')\""
  done
  [ -z "$flag_spot" ] || keep=(-e 's/ # spot only$//')
  sed "${keep[@]}" -e '/^#/d' -e "s|__NAME__|$flag_name|" -e "s|__IMAGE__|$flag_image|" -e "s|__HOSTS__|$hosts|" \
    -e "s|__CHIPS__|$chips|" -e "s|__ACCELERATOR__|$accelerator|" -e "s|__TOPOLOGY__|$flag_topology|" \
    -e "s|__RESTARTS__|$flag_restarts|" -e "s|__ACCOUNT__|$flag_account|" \
    -e "s|__ARGUMENTS__|$(printf '%s' "${arguments#, }" | sed 's/[\\&|]/\\&/g')|" launch/jobset.yaml
}

run() {
  local manifest
  need_kubectl
  manifest="$(render)" || exit 2
  call kubectl create --filename=- <<< "$manifest" ||
    fail "the cluster refused the JobSet; kubectl's message is above, and \"down\" deletes a JobSet with this name"
}

need_kubectl() {
  need kubectl "it with: gcloud components install kubectl"
}

pods="--selector=jobset.sigs.k8s.io/jobset-name=$flag_name"
for action in "${actions[@]}"; do
  case "$action" in
    pool | image | render | run) "$action" ;;
    logs)
      need_kubectl
      call kubectl logs --follow --tail=200 "$pods,batch.kubernetes.io/job-completion-index=0" ||
        fail "$flag_name has no output yet; \"status\" shows the state of its pods"
      ;;
    status)
      need_kubectl
      if ! call kubectl get jobset "$flag_name" || ! call kubectl get pods "$pods"; then
        fail "kubectl cannot get $flag_name; its message is above"
      fi
      ;;
    down)
      need_kubectl
      agree "Delete the JobSet $flag_name?"
      # Delete the pods first, so that a new JobSet of this name does not meet them.
      call kubectl delete jobset "$flag_name" --cascade=foreground --ignore-not-found ||
        fail "$flag_name was not deleted; kubectl's message is above"
      ;;
  esac
done
