"""launch/slurm.sbatch with a fake Slurm, and launch/supervise.sh, the restart loop."""

import contextlib
import os
import re
import signal
import subprocess

import pytest
from helpers.commands import succeeded
from helpers.launch_machines import PAGE

(DOCUMENTED, SHOWN), *_ = re.findall(r"```bash\n(sbatch .*?)```.*?```text\n(srun .*?)\n```", PAGE.read_text(), re.S)


# ---------------------------------------------------------------------------------------------------- slurm
def test_the_documented_command_starts_the_documented_tasks(machines):
    done = succeeded(machines(DOCUMENTED))
    assert "trained" in done.stdout
    assert machines.calls("srun") == [SHOWN.split()]
    assert machines.calls("scontrol", "squeue") == []
    assert (machines.root / ".venv" / "made-from-cuda.txt").exists()


@pytest.mark.parametrize(("command", "seconds"), [("predict --images=photos", 0), ("features --config=vpt", 300)])
def test_workers_on_parts_are_not_ended_after_another(machines, command, seconds):
    succeeded(machines(f"sbatch launch/slurm.sbatch {command} --output=labels/"))
    [call] = machines.calls("srun")
    assert f"--wait={seconds}" in call


@pytest.mark.variants("code")
@pytest.mark.parametrize(
    ("code", "state", "starts", "requeued"),
    [
        (0, "RUNNING", 1, False),
        (130, "RUNNING", 1, True),  # time limit
        (143, "RUNNING", 1, True),  # time limit, before the program handled signals
        (130, "COMPLETING", 1, False),  # cancelled
        (1, "RUNNING", 3, False),
    ],
)
def test_exit_codes_end_restart_or_requeue_the_job(machines, code, state, starts, requeued):
    machines.train(f"exit {code}")
    done = machines("sbatch launch/slurm.sbatch --config=a", JOB_STATE=state, MLMOE_RESTARTS="2")
    assert done.returncode == code
    assert len(machines.calls("srun")) == starts
    assert machines.calls("scontrol") == ([["scontrol", "requeue", "7"]] if requeued else [])


# ------------------------------------------------------------------------------------------------ supervise
@pytest.mark.parametrize(
    ("code", "restarts", "starts"),
    [*((code, 3, 1) for code in (0, 2, 3, 4, 130, 143)), (1, 3, 4), (137, 3, 4), (1, 0, 1)],
)
def test_only_a_crash_is_restarted(machines, code, restarts, starts):
    command = f"bash launch/supervise.sh --restarts={restarts} --state=$FAKE -- bash -c 'echo start; exit {code}'"
    done = machines(command)
    assert done.returncode == code
    assert done.stdout.count("start") == starts
    assert (machines.fake / "run.exit").read_text() == f"{code}\n"


@pytest.mark.slow
def test_a_program_without_a_heartbeat_is_ended_and_restarted(machines):
    script = 'trap "" TERM; echo start; for i in 1 2 3; do sleep 1; touch $MLMOE_HEARTBEAT; done; echo hangs; sleep 99'
    variables = {"MLMOE_HANG_SECONDS": "3", "MLMOE_GRACE_SECONDS": "0"}
    done = machines(f"bash launch/supervise.sh --restarts=1 -- bash -c '{script}'", **variables)
    assert done.returncode == 75
    assert done.stdout.split() == ["start", "hangs"] * 2
    assert done.stderr.count("no step has ended for 3 s; the program hangs and is ended") == 2


@pytest.mark.parametrize("code", [130, 1])
def test_sigterm_is_forwarded_and_ends_the_loop(machines, code):
    script = f'trap "sleep 0.2; echo saved; exit {code}" TERM; echo begun; while :; do sleep 0.02; done'
    process = subprocess.Popen(
        ["bash", "launch/supervise.sh", "--", "bash", "-c", script],
        cwd=machines.root,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=30)[0] == "saved\n"
        assert process.returncode == code
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
