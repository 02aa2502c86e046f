"""launch/tpu_vm.sh and launch/worker.sh on a fake slice of two workers, which are two local folders."""

import contextlib
import os

import psutil
import pytest
from helpers.commands import succeeded
from helpers.jobs import until

SLICE = "--name=my-slice --zone=us-west4-a"
NEW = f"{SLICE} --type=v5litepod-16"
RUN = "--config=configs/a.py:x=1,y=2 --workdir='gs://my bucket/it'\\''s'"


@pytest.fixture
def ready(machines):
    """A slice with the code and the environment on it."""
    succeeded(machines(f"bash launch/tpu_vm.sh up sync setup {NEW}"))
    return machines


def homes(machines):
    """Return the folders of the workers."""
    return [machines.fake / worker / "mlmoe" for worker in ("worker-0", "worker-1")]


def verbs(machines):
    """Return the gcloud actions of the last command, without `describe`."""
    return [call[4] for call in machines.calls("gcloud") if call[4] != "describe"]


# ------------------------------------------------------------------------------------------------- the slice
@pytest.mark.parametrize(
    ("states", "asked"),
    [
        ("", ["create"]),
        ("v5litepod-16\tREADY\n", []),
        ("v5litepod-16\tCREATING\nv5litepod-16\tCREATING\nv5litepod-16\tREADY\n", []),
        ("v5litepod-16\tPREEMPTED\n", ["delete", "create"]),
        ("v5litepod-16\tSTOPPED\n", ["start"]),
    ],
)
def test_up_creates_waits_for_reuses_or_replaces_the_slice(machines, states, asked):
    (machines.fake / "states").write_text(states)
    succeeded(machines(f"bash launch/tpu_vm.sh up {NEW}"))
    assert verbs(machines) == asked


@pytest.mark.parametrize(
    ("kind", "image"),
    [
        ("v6e-8", "v2-alpha-tpuv6e"),
        ("v5litepod-4", "v2-alpha-tpuv5-lite"),
        ("v4-32", "tpu-ubuntu2204-base"),
    ],
)
def test_default_image_of_each_generation(machines, kind, image):
    machines(f"bash launch/tpu_vm.sh up {SLICE} --type={kind} --project=my-project")
    (create,) = (call for call in machines.calls("gcloud") if call[4] == "create")
    assert f"--version={image}" in create
    assert "--project=my-project" in create
    machines(f"bash launch/tpu_vm.sh down up {SLICE} --type={kind} --runtime=of-my-own --yes")
    (create,) = (call for call in machines.calls("gcloud") if call[4] == "create")
    assert "--version=of-my-own" in create


def test_up_waits_in_the_queue(machines):
    queue = r"\tWAITING_FOR_RESOURCES\n\tPROVISIONING\nv6e-256\tACTIVE\n"
    done = succeeded(machines(f"bash launch/tpu_vm.sh up {SLICE} --type=v6e-256 --queued", CREATED=queue))
    assert "WAITING_FOR_RESOURCES" in done.stderr
    assert [call[3:5] for call in machines.calls("gcloud")] == [
        ["queued-resources", action] for action in ("describe", "create", "describe", "describe", "describe")
    ]
    # A slice that failed or lost its machines is replaced.
    (machines.fake / "states").write_text("v6e-256\tSUSPENDED\n")
    machines(f"bash launch/tpu_vm.sh up {SLICE} --type=v6e-256 --queued")
    assert verbs(machines) == ["delete", "create"]


def test_down_deletes_the_slice_once_it_is_confirmed(ready):
    succeeded(ready(f"echo y | bash launch/tpu_vm.sh down {SLICE}"))
    assert verbs(ready) == ["delete"]


# ----------------------------------------------------------------------------------------------- the workers
def test_sync_sends_the_tracked_files_of_the_working_tree(ready):
    (ready.root / "launch" / "local.sh").write_text("changed")
    (ready.root / "photo.jpg").write_text("git does not know it")
    (homes(ready)[1] / "code/removed.py").write_text("from an earlier sync")
    assert ready(f"bash launch/tpu_vm.sh sync {SLICE}").returncode == 0
    for home in homes(ready):
        assert (home / "code/launch/local.sh").read_text() == "changed"
        assert not (home / "code/photo.jpg").exists()
        assert not (home / "code/removed.py").exists()
    (ready.root / "requirements.txt").unlink()
    assert "git status" in ready.refused(f"bash launch/tpu_vm.sh sync {SLICE}")


def test_setup_creates_an_environment_with_its_own_python_once(machines):
    machines(f"bash launch/tpu_vm.sh up sync setup {NEW}")
    assert [call[1:] for call in machines.calls("uv")] == 2 * [
        ["python", "install", "3.12"],
        ["python", "find", "3.12"],
    ]
    asked = [call[2:] for call in machines.calls("python3.12", "python") if call[1] == "-m"]
    for home in homes(machines):
        assert ["venv", str(home / "venv")] in asked
    assert [call[-3:] for call in asked if call[0] == "pip"] == 2 * [["--require-hashes", "-r", "locks/tpu.lock"]]
    machines(f"bash launch/tpu_vm.sh setup {SLICE}")
    assert [call for call in machines.calls("python3.12", "python") if "pip" in call] == []
    assert "setup failed on a worker" in machines.refused(f"bash launch/tpu_vm.sh setup {SLICE}", FAIL="install 3.12")


def test_flags_reach_the_program_unchanged(ready):
    done = succeeded(ready(f"bash launch/tpu_vm.sh run logs {SLICE} -- {RUN}"))
    assert "trained" in done.stdout
    until(lambda: len(ready.calls("python")) == 2)
    program = ["python", "-m", "mlmoe_jax.main", "--config=configs/a.py:x=1,y=2", "--workdir=gs://my bucket/it's"]
    assert ready.calls("python") == [program, program]


@pytest.mark.slow
def test_a_training_survives_a_lost_connection_and_stops_on_request(ready):
    ready.train('trap "echo saved; exit 130" TERM; echo begun; while :; do sleep 0.02; done')
    assert ready(f"bash launch/tpu_vm.sh run {SLICE} -- --config=a").returncode == 0
    until(lambda: all("begun" in (home / "run.log").read_text() for home in homes(ready)))
    for home in homes(ready):
        assert os.getsid(int((home / "run.pid").read_text())) not in (os.getsid(0), os.getsid(os.getpid()))
    # Its code is not replaced while it runs, and it is not started twice.
    for action, reason in {"run": "a training is already running", "sync": "a training is running"}.items():
        done = ready(f"bash launch/tpu_vm.sh {action} {SLICE} -- --config=a")
        assert done.returncode == 2
        assert done.stderr.count(reason) == 2, "the message of each worker"
        assert f"{action} failed on a worker" in done.stderr.splitlines()[-1]
    assert "begun" in ready(f"bash launch/tpu_vm.sh status {SLICE}").stdout
    assert ready(f"bash launch/tpu_vm.sh stop {SLICE}").returncode == 0
    for home in homes(ready):
        assert "saved\nsupervise: ended with exit code 130\n" in (home / "run.log").read_text()
    assert ready(f"bash launch/tpu_vm.sh status {SLICE}").stdout.count("ended with exit code 130") == 2
    # The exit code of logs is that of the training, and later actions are skipped.
    done = ready(f"bash launch/tpu_vm.sh logs down {SLICE} --worker=1 --yes")
    assert done.returncode == 130
    assert verbs(ready) == ["ssh"]
    assert ready(f"bash launch/tpu_vm.sh stop {SLICE}").returncode == 0  # no training to stop


@pytest.mark.slow
def test_a_crash_is_restarted_and_a_user_error_is_not(ready):
    ready.train('echo start >> starts; [ "$(wc -l < starts)" -gt 2 ] || exit 1')
    done = ready(f"bash launch/tpu_vm.sh run logs {SLICE} --restarts=2 -- --config=a")
    assert done.returncode == 0
    assert (homes(ready)[0] / "code/starts").read_text() == 3 * "start\n"
    # `logs` waits for one worker only.
    until(lambda: ready(f"bash launch/tpu_vm.sh status {SLICE}").stdout.count("ended with exit code 0") == 2)
    ready.train("echo error: no such thing; exit 2")
    done = ready(f"bash launch/tpu_vm.sh run logs {SLICE} -- --config=a")
    assert done.returncode == 2
    assert done.stdout.count("no such thing") == 1


def test_missing_parts_on_a_worker_are_reported(machines):
    machines(f"bash launch/tpu_vm.sh up sync {NEW}")
    for action, reason in {
        "run": "has no environment yet; run setup first",
        "logs": "no training has been started",
    }.items():
        done = machines(f"bash launch/tpu_vm.sh {action} {SLICE} -- --config=a")
        assert done.returncode == 2
        assert reason in done.stderr
    assert machines(f"bash launch/tpu_vm.sh status {SLICE}").stdout.count("not started yet") == 2


@pytest.mark.slow
def test_a_killed_training_is_not_reported_as_done(ready):
    ready.train("echo begun; while :; do sleep 0.02; done")
    ready(f"bash launch/tpu_vm.sh run {SLICE} -- --config=a")
    for home in homes(ready):
        until(lambda home=home: "begun" in (home / "run.log").read_text())
        supervisor = psutil.Process(int((home / "run.pid").read_text()))
        for process in [supervisor, *supervisor.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):  # ended by itself meanwhile, such as a short sleep
                process.kill()
    until(lambda: ready(f"bash launch/tpu_vm.sh status {SLICE}").stdout.count("was killed") == 2)
    done = ready(f"bash launch/tpu_vm.sh logs {SLICE}")
    assert done.returncode == 2
    assert "was killed" in done.stderr
