"""launch/tpu_vm.sh and launch/worker.sh on a slice of two workers, which are two folders of this machine."""

import os
import signal
import time

import pytest

SLICE = "--name=my-slice --zone=us-west4-a"
NEW = f"{SLICE} --type=v5litepod-16"
RUN = "--config=configs/a.py:x=1,y=2 --workdir='gs://my bucket/it'\\''s'"


def until(true, seconds=20):
    """Wait until something becomes true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def ready(machines):
    """A slice with the code and the environment on it."""
    done = machines(f"bash launch/tpu_vm.sh up sync setup {NEW}")
    assert done.returncode == 0, done.stderr
    return machines


def verbs(machines):
    """What the last command asked of gcloud about the slice, without looking at it."""
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
def test_up_creates_waits_reuses_or_replaces(machines, states, asked):
    (machines.fake / "states").write_text(states)
    done = machines(f"bash launch/tpu_vm.sh up {NEW}")
    assert done.returncode == 0, done.stderr
    assert verbs(machines) == asked


@pytest.mark.parametrize(
    ("kind", "image"),
    [
        ("v6e-8", "v2-alpha-tpuv6e"),
        ("v5p-8", "v2-alpha-tpuv5"),
        ("v5litepod-4", "v2-alpha-tpuv5-lite"),
        ("v4-32", "tpu-ubuntu2204-base"),
    ],
)
def test_each_generation_has_its_image(machines, kind, image):
    machines(f"bash launch/tpu_vm.sh up {SLICE} --type={kind} --project=my-project")
    (create,) = (call for call in machines.calls("gcloud") if call[4] == "create")
    assert f"--version={image}" in create
    assert "--project=my-project" in create
    machines(f"bash launch/tpu_vm.sh down up {SLICE} --type={kind} --runtime=of-my-own --yes")
    (create,) = (call for call in machines.calls("gcloud") if call[4] == "create")
    assert "--version=of-my-own" in create


def test_the_queue_is_waited_for(machines):
    queue = r"\tWAITING_FOR_RESOURCES\n\tPROVISIONING\nv6e-256\tACTIVE\n"
    done = machines(f"bash launch/tpu_vm.sh up {SLICE} --type=v6e-256 --queued", CREATED=queue)
    assert done.returncode == 0, done.stderr
    assert "WAITING_FOR_RESOURCES" in done.stderr
    assert [call[3:5] for call in machines.calls("gcloud")] == [
        ["queued-resources", action] for action in ("describe", "create", "describe", "describe", "describe")
    ]
    # One that failed, or lost its machines, is replaced.
    (machines.fake / "states").write_text("v6e-256\tSUSPENDED\n")
    machines(f"bash launch/tpu_vm.sh up {SLICE} --type=v6e-256 --queued")
    assert verbs(machines) == ["delete", "create"]


MISTAKES = [
    ("", "say what to do: up sync"),
    ("fly", 'does not know "fly"'),
    ("up --zone=us-west4-a", "--name is missing"),
    ("up --name=a", "--zone is missing"),
    ("up --name=My_Slice --zone=us-west4-a", "--name=My_Slice is not of the right form"),
    (f"up {SLICE}", "--type is missing"),
    (f"up {SLICE} --type=v9x-8", "the usual image of --type=v9x-8 is not known"),
    (f"up {SLICE} --type=big", "--type=big is not of the right form"),
    ("up --name=a --zone=earth", "--zone=earth is not of the right form"),
    (f"up {SLICE} --project='a b'", "--project=a b is not"),
    (f"logs {SLICE} --worker=first", "--worker=first is not"),
    (f"run {SLICE} --restarts=-1 -- --config=a", "--restarts=-1 is not"),
    (f"up {SLICE} --colour=red", "has no flag --colour"),
    (f"up {SLICE} --fast", "has no flag --fast"),
    ("up --name --zone=us-west4-a", "--name has no value"),
    ("up --name= --zone=us-west4-a", "--name has no value"),
    (f"run {SLICE}", "run needs the flags of the program"),
]


def test_mistakes_are_one_sentence_and_nothing_is_changed(machines):
    for arguments, part in MISTAKES:
        assert part in machines.refused(f"bash launch/tpu_vm.sh {arguments}")
        assert verbs(machines) == []


def test_what_gcloud_refuses_is_said(machines):
    up = f"bash launch/tpu_vm.sh up {NEW}"
    assert "gcloud is not on the path" in machines.refused(up, tools=False)
    assert machines.refused(up, FAIL=" describe ") == "gcloud cannot look at my-slice: it went wrong"
    assert "gcloud could not create my-slice" in machines.refused(up, FAIL=" create ")
    assert "was not given" in machines.refused(up, CREATED=r"\tFAILED\n")
    (machines.fake / "states").write_text("v5litepod-16\tREADY\n")
    assert "gcloud could not delete my-slice" in machines.refused(
        f"bash launch/tpu_vm.sh down {SLICE} --yes", FAIL=" delete "
    )
    assert "is a v5litepod-16 already" in machines.refused(f"bash launch/tpu_vm.sh up {SLICE} --type=v5litepod-256")


def test_down_asks(ready):
    assert "nothing was deleted" in ready.refused(f"bash launch/tpu_vm.sh down {SLICE}")
    assert verbs(ready) == []
    assert ready(f"echo y | bash launch/tpu_vm.sh down {SLICE}").returncode == 0
    assert verbs(ready) == ["delete"]


# ----------------------------------------------------------------------------------------------- the workers
def test_sync_sends_what_git_knows_as_it_is_now(ready):
    (ready.root / "launch" / "local.sh").write_text("changed")
    (ready.root / "photo.jpg").write_text("git does not know it")
    (ready.fake / "worker-1" / "mlmoe" / "code" / "removed.py").write_text("from an earlier sync")
    assert ready(f"bash launch/tpu_vm.sh sync {SLICE}").returncode == 0
    for worker in ("worker-0", "worker-1"):
        code = ready.fake / worker / "mlmoe" / "code"
        assert (code / "launch" / "local.sh").read_text() == "changed"
        assert not (code / "photo.jpg").exists()
        assert not (code / "removed.py").exists()
    (ready.root / "requirements.txt").unlink()
    assert "git status" in ready.refused(f"bash launch/tpu_vm.sh sync {SLICE}")


def test_setup_makes_an_environment_with_a_python_of_its_own_once(machines):
    machines(f"bash launch/tpu_vm.sh up sync setup {NEW}")
    assert [call[1:] for call in machines.calls("uv")] == 2 * [
        ["python", "install", "3.12"],
        ["python", "find", "3.12"],
    ]
    asked = [call[2:] for call in machines.calls("python3.12", "python") if call[1] == "-m"]
    for worker in ("worker-0", "worker-1"):
        assert ["venv", str(machines.fake / worker / "mlmoe" / "venv")] in asked
    assert [call[-2:] for call in asked if call[0] == "pip"] == 2 * [
        ["-r", "requirements.txt"],
        ["--disable-pip-version-check", "some-package"],
    ]
    machines(f"bash launch/tpu_vm.sh setup {SLICE}")
    assert [call for call in machines.calls("python3.12", "python") if "pip" in call] == []
    assert "setup failed on a worker" in machines.refused(f"bash launch/tpu_vm.sh setup {SLICE}", FAIL="install 3.12")


def test_the_program_gets_its_flags_as_they_were_given(ready):
    done = ready(f"bash launch/tpu_vm.sh run logs {SLICE} -- {RUN}")
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout
    until(lambda: len(ready.calls("python")) == 2)
    program = ["python", "-m", "mlmoe_jax.main", "--config=configs/a.py:x=1,y=2", "--workdir=gs://my bucket/it's"]
    assert ready.calls("python") == [program, program]


def test_a_training_outlives_its_connection_and_stops_when_told(ready):
    ready.train('trap "echo saved; exit 130" TERM; echo begun; while :; do sleep 0.02; done')
    assert ready(f"bash launch/tpu_vm.sh run {SLICE} -- --config=a").returncode == 0
    homes = [ready.fake / worker / "mlmoe" for worker in ("worker-0", "worker-1")]
    until(lambda: all("begun" in (home / "run.log").read_text() for home in homes))
    for home in homes:
        assert os.getsid(int((home / "run.pid").read_text())) not in (os.getsid(0), os.getsid(os.getpid()))
    # Its code is not replaced under its feet, and it does not run twice.
    assert "run failed on a worker" in ready.refused(f"bash launch/tpu_vm.sh run {SLICE} -- --config=a")
    assert "sync failed on a worker" in ready.refused(f"bash launch/tpu_vm.sh sync {SLICE}")
    assert "begun" in ready(f"bash launch/tpu_vm.sh status {SLICE}").stdout
    assert ready(f"bash launch/tpu_vm.sh stop {SLICE}").returncode == 0
    for home in homes:
        assert "saved\nsupervise: ended with exit code 130\n" in (home / "run.log").read_text()
    assert ready(f"bash launch/tpu_vm.sh status {SLICE}").stdout.count("ended with exit code 130") == 2
    # The exit code of the training is that of logs, and what would come after it does not.
    done = ready(f"bash launch/tpu_vm.sh logs down {SLICE} --worker=1 --yes")
    assert done.returncode == 130
    assert verbs(ready) == ["ssh"]
    assert ready(f"bash launch/tpu_vm.sh stop {SLICE}").returncode == 0  # nothing runs: nothing to stop


def test_a_crash_starts_it_again_and_a_mistake_does_not(ready):
    ready.train('echo start >> starts; [ "$(wc -l < starts)" -gt 2 ] || exit 1')
    done = ready(f"bash launch/tpu_vm.sh run logs {SLICE} --restarts=2 -- --config=a")
    assert done.returncode == 0
    assert (ready.fake / "worker-0" / "mlmoe" / "code" / "starts").read_text() == 3 * "start\n"
    ready.train("echo error: no such thing; exit 2")
    done = ready(f"bash launch/tpu_vm.sh run logs {SLICE} -- --config=a")
    assert done.returncode == 2
    assert done.stdout.count("no such thing") == 1


def test_what_is_missing_on_a_worker_is_said(machines):
    machines(f"bash launch/tpu_vm.sh up sync {NEW}")
    done = machines(f"bash launch/tpu_vm.sh run {SLICE} -- --config=a")
    assert done.returncode == 2
    assert "has no environment yet; run setup first" in done.stderr
    assert machines(f"bash launch/tpu_vm.sh status {SLICE}").stdout.count("nothing was started yet") == 2
    done = machines(f"bash launch/tpu_vm.sh logs {SLICE}")
    assert done.returncode == 2
    assert "nothing was started" in done.stderr


def test_a_training_that_was_killed_is_not_taken_for_done(ready):
    ready.train("echo begun; while :; do sleep 0.02; done")
    ready(f"bash launch/tpu_vm.sh run {SLICE} -- --config=a")
    for worker in ("worker-0", "worker-1"):
        home = ready.fake / worker / "mlmoe"
        until(lambda home=home: "begun" in (home / "run.log").read_text())
        os.killpg(int((home / "run.pid").read_text()), signal.SIGKILL)  # the session, with all that is in it
    until(lambda: ready(f"bash launch/tpu_vm.sh status {SLICE}").stdout.count("was killed") == 2)
    done = ready(f"bash launch/tpu_vm.sh logs {SLICE}")
    assert done.returncode == 2
    assert "was killed" in done.stderr
