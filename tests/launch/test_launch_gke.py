"""launch/gke.sh: the manifest rendered from launch/jobset.yaml, and the calls of the tools."""

import json
import os
import shlex
import subprocess
import time

import jsonschema
import pytest
import yaml
from helpers.commands import succeeded
from helpers.launch_machines import REPOSITORY

SCHEMA = json.loads((REPOSITORY / "tests/launch/jobset_schema.json").read_text())
IMAGE = "--image=us-docker.pkg.dev/my-project/my-repository/mlmoe:1"
FLAGS = ["--config=configs/a.py:x=1,y=2", "--workdir=gs://b/it's", '--config.a="b|c&d\\e"', "--images", "é"]


def render(machines, flags="--tpu=v5e --topology=4x4", program="-- --config=a --workdir=gs://b/c"):
    """Return the manifest, checked against its schema."""
    done = succeeded(machines(f"bash launch/gke.sh render --name=my-run {IMAGE} {flags} {program}"))
    assert "__" not in done.stdout
    manifest = yaml.safe_load(done.stdout)
    jsonschema.validate(manifest, SCHEMA, jsonschema.Draft202012Validator)
    return manifest


def parts(manifest):
    """Return the only job of a manifest, its pod and its container."""
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    return job, pod, pod["containers"][0]


@pytest.mark.parametrize(
    ("tpu", "topology", "accelerator", "hosts", "chips", "machine"),
    [
        ("v5e", "16x16", "tpu-v5-lite-podslice", 64, 4, "ct5lp-hightpu-4t"),
        ("v5e", "2x4", "tpu-v5-lite-podslice", 2, 4, "ct5lp-hightpu-4t"),
        ("v6e", "1x1", "tpu-v6e-slice", 1, 1, "ct6e-standard-1t"),
        ("v5p", "2x2x1", "tpu-v5p-slice", 1, 4, "ct5p-hightpu-4t"),
        ("v4", "4x4x8", "tpu-v4-podslice", 32, 4, "ct4p-hightpu-4t"),
    ],
)
def test_hosts_chips_and_machines_of_a_slice(machines, tpu, topology, accelerator, hosts, chips, machine):
    job, pod, container = parts(render(machines, f"--tpu={tpu} --topology={topology}"))
    assert (job["completions"], job["parallelism"]) == (hosts, hosts)
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    assert container["resources"] == {name: {"google.com/tpu": chips} for name in ("limits", "requests")}
    machines(
        f"bash launch/gke.sh pool --name=my-run --tpu={tpu} --topology={topology} --cluster=c --location=us-west4-a"
    )
    (call,) = machines.calls("gcloud")
    assert {f"--machine-type={machine}", f"--num-nodes={hosts}"} <= set(call)
    assert (f"--tpu-topology={topology}" in call) == (hosts > 1)


def test_flags_reach_the_program_unchanged(machines):
    program = shlex.join(FLAGS)
    manifest = render(machines, program=f"-- {program}")
    _, _, container = parts(manifest)
    assert container["args"] == FLAGS
    assert container["image"] == IMAGE.removeprefix("--image=")
    command = f"bash launch/gke.sh run --name=my-run {IMAGE} --tpu=v5e --topology=4x4 -- {program}"
    assert machines(command).returncode == 0
    assert yaml.safe_load((machines.fake / "manifest").read_text()) == manifest


def test_a_user_error_fails_the_jobset_and_any_other_failure_restarts_it(machines):
    manifest = render(machines, "--tpu=v5e --topology=4x4 --restarts=7")
    job, pod, container = parts(manifest)
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 7
    # A failed pod fails the job, and the JobSet restarts all pods ...
    assert (job["backoffLimit"], pod["restartPolicy"]) == (0, "Never")
    # ... unless its exit code is 2, which fails the job with a separate reason.
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [2, 4]}
    (last,) = manifest["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], last["action"]) == ("FailJob", "FailJobSet")
    assert last["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert pod["terminationGracePeriodSeconds"] >= 60
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_a_pod_without_a_heartbeat_fails(machines, tmp_path):
    _, _, container = parts(render(machines))
    [variable] = container["env"]
    assert variable["name"] == "MLMOE_HEARTBEAT"
    file = tmp_path / "heartbeat"
    probe = [word.replace("/tmp", str(tmp_path)) for word in container["livenessProbe"]["exec"]["command"]]
    assert variable["value"] == "/tmp/heartbeat"
    assert subprocess.run(probe).returncode == 0, "the first probe makes the file"
    for minutes, code in ((14, 0), (16, 1)):
        os.utime(file, (time.time() - 60 * minutes,) * 2)
        assert subprocess.run(probe).returncode == code


def test_spot_and_account_are_set_only_if_requested(machines):
    _, pod, _ = parts(render(machines))
    assert "tolerations" not in pod
    assert pod["serviceAccountName"] == "default"
    _, pod, _ = parts(render(machines, "--tpu=v5e --topology=4x4 --spot --account=trainer"))
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert pod["tolerations"][0]["key"] == "cloud.google.com/gke-spot"
    assert pod["serviceAccountName"] == "trainer"
