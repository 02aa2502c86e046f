import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlmoe_jax.data.pipeline import SkippedImages
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime import cluster, distributed, preemption, watchdog
from mlmoe_jax.runtime.cluster import VARIABLES, Cluster, find_cluster, local_devices
from mlmoe_jax.runtime.preemption import asked_to_stop
from mlmoe_jax.runtime.progress import Meter, Progress
from mlmoe_jax.runtime.watchdog import HUNG, Watchdog


def variables(coordinator="10.0.0.1:5000", processes="3", process="1") -> dict[str, str]:
    return {name: v for name, v in zip(VARIABLES, (coordinator, processes, process), strict=True) if v is not None}


@pytest.fixture
def alone(monkeypatch):
    """An environment without other processes."""
    for name in (*VARIABLES, "MLMOE_HANG_SECONDS", "SLURM_JOB_ID", "OMPI_COMM_WORLD_SIZE", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.delenv(name, raising=False)


# ----------------------------------------------------------------------------------------------- the processes of a job
def test_three_variables_give_the_index_of_a_process():
    found = find_cluster(variables())
    assert (found.index, found.count) == (1, 3)
    assert found.arguments == {
        "coordinator_address": "10.0.0.1:5000",
        "num_processes": 3,
        "process_id": 1,
        "cluster_detection_method": "deactivate",
    }
    assert find_cluster({}) is None
    assert find_cluster(variables(processes="1", process="0")) is None, "a single process has no others to join"
    assert find_cluster(variables(coordinator="[fe80::1]:5000")).arguments["coordinator_address"] == "[fe80::1]:5000"


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        (variables(coordinator=None), "MLMOE_PROCESSES is set and MLMOE_COORDINATOR is not; set all of "),
        (variables(process=None), "MLMOE_COORDINATOR is set and MLMOE_PROCESS is not; set all of "),
        (variables(processes=""), "MLMOE_COORDINATOR is set and MLMOE_PROCESSES is not; set all of "),
        (variables(coordinator="10.0.0.1"), "MLMOE_COORDINATOR=10.0.0.1 is not HOST:PORT, such as 10.0.0.1:5000"),
        (variables(coordinator="host:70000"), "MLMOE_COORDINATOR=host:70000 is not HOST:PORT"),
        (variables(process="3"), "MLMOE_PROCESS=3 is out of range for MLMOE_PROCESSES=3; processes count from 0"),
        (variables(process="-1"), "MLMOE_PROCESS=-1 is not a number of 0 or more"),
        (variables(processes="two"), "MLMOE_PROCESSES=two is not a number of 0 or more"),
    ],
)
def test_inconsistent_variables_are_refused(refusal, environment, sentence):
    assert refusal(find_cluster, environment).startswith(sentence)


SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}


def test_slurm_tasks_are_counted_and_share_the_gpus():
    assert find_cluster(SLURM) == Cluster(5, 8, {"cluster_detection_method": "slurm", "local_device_ids": None})
    found = find_cluster(SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", "SLURM_GPUS_ON_NODE": "8"})
    assert found.arguments["local_device_ids"] == [2, 3]
    one_each = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x8)", "SLURM_LOCALID": "0", "SLURM_GPUS_ON_NODE": "4"}
    assert find_cluster(one_each).arguments["local_device_ids"] == [0, 1, 2, 3]
    assert find_cluster(SLURM | {"SLURM_NTASKS": "1"}) is None
    in_the_batch_script = {name: value for name, value in SLURM.items() if not name.startswith("SLURM_STEP")}
    assert find_cluster(in_the_batch_script) is None


@pytest.mark.parametrize(
    ("local", "processes", "visible", "on_machine", "used"),
    [
        (0, 1, 4, 4, [0, 1, 2, 3]),
        (1, 2, 4, 4, [2, 3]),
        (3, 4, None, 4, [3]),
        (2, 4, 1, 4, [0]),  # each process is bound to its own GPU, which it sees as the first
        (1, 2, 2, 4, [0, 1]),
        (1, 4, 2, None, None),  # fewer GPUs than processes: JAX reports the error
        (0, 2, None, None, None),
        (0, 2, 0, 0, None),
        (0, None, 4, 4, None),
    ],
)
def test_gpus_of_a_process(local, processes, visible, on_machine, used):
    assert local_devices(local=local, processes=processes, visible=visible, on_machine=on_machine) == used


OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def test_open_mpi_counts_its_ranks(monkeypatch, refusal):
    found = find_cluster(OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911"})
    assert found == Cluster(3, 4, {"cluster_detection_method": "ompi", "local_device_ids": None})
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: name == "mpi4py" or None)
    assert find_cluster(OPEN_MPI).arguments["cluster_detection_method"] == "mpi4py"
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: None)
    assert "install mpi4py" in refusal(find_cluster, OPEN_MPI)
    assert find_cluster(OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}) is None


def test_tpu_hosts_of_gke_count_workers_and_slices(monkeypatch):
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: name == "libtpu" or None)
    hosts = {"TPU_WORKER_HOSTNAMES": "a,b,c,d", "TPU_WORKER_ID": "2"}
    assert find_cluster(hosts) == Cluster(2, 4, {"cluster_detection_method": "gketpu"})
    found = find_cluster(hosts | {"MEGASCALE_NUM_SLICES": "3", "MEGASCALE_SLICE_ID": "1"})
    assert (found.index, found.count) == (6, 12)
    assert find_cluster(hosts | {"JAX_PLATFORMS": "cpu"}) is None
    assert find_cluster(hosts | {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}) is None


def test_tpu_machines_read_the_metadata_server(monkeypatch):
    known = {
        "worker-network-endpoints": "a:1:10.0.0.1,b:2:10.0.0.2",
        "agent-worker-number": "1",
        "tpu-env": "ACCELERATOR_TYPE: 'v5e-8'\nMEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\n",
    }
    monkeypatch.setattr(cluster, "_has_tpu", lambda: True)
    monkeypatch.setattr(cluster, "_metadata", known.__getitem__)
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: None)
    assert find_cluster({}) is None, "without libtpu"
    assert find_cluster({"TPU_LIBRARY_PATH": "/lib"}) == Cluster(3, 4, {"cluster_detection_method": "gcetpu"})
    known |= {"worker-network-endpoints": "a:1:10.0.0.1", "agent-worker-number": "0", "tpu-env": ""}
    assert find_cluster({"TPU_LIBRARY_PATH": "/lib"}) is None

    def nobody(name):
        raise urllib.error.URLError("no such host")

    monkeypatch.setattr(cluster, "_metadata", nobody)
    assert find_cluster({"TPU_LIBRARY_PATH": "/lib"}) is None


# ------------------------------------------------------------------------------------------------------ start and end
def test_a_single_process_calls_the_function(alone):
    before = sys.stdout
    assert distributed.run(lambda: 7, together=True) == 7
    assert sys.stdout is before
    with pytest.raises(UserError, match="as it is"):
        distributed.run(_refuse, together=True)


def _refuse():
    raise UserError("as it is")


def test_unshared_work_is_done_by_the_first_process(alone, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    done = []
    for process in ("1", "0"):
        for name, value in variables(process=process).items():
            monkeypatch.setenv(name, value)
        assert distributed.run(lambda number=process: done.append(number) or 3, together=False) == 3 * (process == "0")
    assert done == ["0"]


def test_is_first_does_not_import_jax():
    program = "import mlmoe_jax.runtime.distributed as d, sys; assert d.is_first(); assert 'jax' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", program], check=True, env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    )


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("there is no such file"), 2, "error: there is no such file\n"),
        (KeyboardInterrupt(), 130, "process 1 of 3 was interrupted\n"),
        (SystemExit(4), 4, ""),
        (RuntimeError("connection\nclosed"), 1, "or another one failed: connection (RuntimeError); rerun the same"),
    ],
)
def test_a_failing_process_prints_the_reason_and_exits_at_once(monkeypatch, capsys, error, code, said):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    distributed._end(error, "process 1 of 3")
    assert ended == [code]
    assert said in capsys.readouterr().err


def test_waiting_for_a_coordinator_that_starts_late(refusal):
    with socket.socket() as late:
        late.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{late.getsockname()[1]}"
        threading.Timer(0.3, late.listen).start()
        began = time.monotonic()
        distributed._wait_for(address, 20, "process 1 of 2")
        assert time.monotonic() - began > 0.2
    sentence = refusal(distributed._wait_for, address, 0, "process 1 of 2")
    assert sentence.startswith(f"process 1 of 2 cannot reach MLMOE_COORDINATOR={address} after 0 s")


# ----------------------------------------------------------------------------------------------------------- agreeing
def test_one_process_agrees_with_itself():
    assert distributed.process() == (0, 1)
    assert distributed.is_first()
    assert distributed.gather({"a": [1, None, "ä"]}) == [{"a": [1, None, "ä"]}]
    assert distributed.broadcast_from_first([1]) == [1]
    distributed.barrier("here")
    vote = distributed.Vote()
    assert [vote.any(yes) for yes in (False, True, False)] == [False, True, False]
    assert SkippedImages("split", {4, 2}).everywhere().rows == {2, 4}


def test_to_host_keeps_every_bit():
    tree = {"a": jnp.array([jnp.nan, -0.0, 1e-42]), "b": np.arange(3), "c": 4}
    there = distributed.to_host(tree)
    assert there["a"].tobytes() == np.asarray(tree["a"]).tobytes()
    assert isinstance(there["a"], np.ndarray)
    assert there["b"].tolist() == [0, 1, 2]
    assert there["c"] == 4


def test_only_arrays_sharded_over_processes_are_gathered(monkeypatch):
    class Parts(jax.Array):
        is_fully_addressable, is_fully_replicated = False, False

        def __init__(self):
            pass

    Parts.__abstractmethods__ = frozenset()
    gathered = []
    monkeypatch.setattr(
        "jax.experimental.multihost_utils.process_allgather",
        lambda leaf, tiled: gathered.append(leaf) or np.full(2, int(tiled)),
    )
    parts = Parts()
    there = distributed.to_host({"parts": parts, "whole": jnp.ones(2)})
    assert gathered == [parts]
    assert there["parts"].tolist() == [1, 1]
    assert there["whole"].tolist() == [1, 1]


def test_one_process_agrees_to_its_own_request_to_stop():
    with asked_to_stop() as asked:
        assert not asked.agreed()
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.wait(5)
        assert asked.agreed()


@pytest.mark.parametrize(("enabled", "stops"), [(True, [False, False, True]), (False, [False, False, False])])
def test_several_processes_heed_the_notices_of_jax(monkeypatch, enabled, stops):
    """A notice is announced to all processes at the same call; JAX compares the numbers of their calls."""
    calls = []
    monkeypatch.setattr(distributed, "process", lambda: (0, 2))
    monkeypatch.setattr(distributed.Vote, "any", lambda self, yes: yes)
    monkeypatch.setattr(
        "jax.experimental.multihost_utils.reached_preemption_sync_point",
        lambda call: calls.append(call) or len(calls) == 3,
    )
    monkeypatch.setattr(preemption, "_service_runs", lambda: enabled)
    with asked_to_stop() as asked:
        assert [asked.agreed() for _ in range(3)] == stops
    with asked_to_stop() as asked:
        asked.agreed()
    assert calls == list(range(calls[0], calls[0] + 4)) if enabled else not calls


def test_a_request_after_the_last_step_is_shared(monkeypatch):
    monkeypatch.setattr(distributed, "gather", lambda value: [value, True])
    with asked_to_stop() as asked:
        assert asked.agreed_at_end()


def test_sigterm_interrupts_as_ctrl_c_does():
    before = signal.getsignal(signal.SIGTERM)

    def wait():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    with pytest.raises(KeyboardInterrupt), preemption.interruptible():
        wait()
    assert signal.getsignal(signal.SIGTERM) == before


# ----------------------------------------------------------------------------------------------------------- watchdog
def patience(dog: Watchdog) -> int:
    """Return the number of seconds without a sign of life that it currently accepts."""
    return next(second for second in range(100_000) if dog.lived(1.0))


def test_an_activity_seen_twice_has_to_end_in_time():
    dog = Watchdog("process 1 of 3", 45)
    assert patience(dog) == 900
    for number, seconds in enumerate((600, 2, 3), start=1):  # the first step compiles
        dog.sign("train", f"step {number} of 9, train")
        assert not dog.lived(seconds)
    dog.sign("train", "step 4 of 9, train")
    assert patience(dog) == 45
    message = dog.lived(1.0)
    assert message.startswith("error: process 1 of 3 has made no progress for 47 s since step 4 of 9, train and ends")
    assert "rerun the same command to resume from the last checkpoint" in message


def test_every_kind_has_its_own_limit():
    dog = Watchdog("process 1 of 3", 45)
    for _ in range(3):
        dog.sign("train", "a step")
        assert not dog.lived(1)
        dog.sign("save", "a checkpoint")
        assert not dog.lived(20)
    dog.sign("save", "a checkpoint")
    assert patience(dog) == 100, "five times the previous 20 s"
    dog.sign("train", "a step")
    assert patience(dog) == 45
    dog.sign("evaluate", "something new")
    assert patience(dog) == 900
    dog.sign("wait", "something that may take", 10)
    assert patience(dog) == 10


def test_a_process_that_hangs_ends_with_a_message():
    program = (
        "from mlmoe_jax.runtime import watchdog; import time\n"
        "watchdog.start('process 1 of 3', 1)\n"
        "[watchdog.sign('train', 'step 4') for _ in range(3)]\n"
        "time.sleep(60)"
    )
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=50)
    assert done.returncode == HUNG
    assert done.stderr.startswith("error: process 1 of 3 has made no progress for 2 s since step 4 and ends itself")


def test_progress_and_downloads_send_signs_of_life(monkeypatch):
    heard = []
    monkeypatch.setattr(watchdog, "sign", lambda kind, what: heard.append((kind, what)))
    progress = Progress("train", 9, 4)
    progress.advance()
    with progress.paused():
        heard.append("evaluation")
    progress.advance()
    progress.close()
    meter = Meter("weights", 0, 4_000_000)
    meter.add(1_000_000)
    meter.close()
    assert heard == [
        ("begin to train", "it began to train"),
        ("train", "step 1 of 9, train"),
        "evaluation",
        ("continue to train", "it continued to train after step 1"),
        ("train", "step 2 of 9, train"),
        ("end of train", "the end of train"),
        ("download", "1.0 MB of weights had arrived"),
    ]


def test_a_single_process_is_not_watched_by_default(alone):
    watchdog.sign("any", "anything")
    assert distributed.run(lambda: int(watchdog._thread is None), together=True) == 1


def test_a_single_process_is_watched_if_a_limit_is_set(alone, monkeypatch):
    monkeypatch.setenv("MLMOE_HANG_SECONDS", "500")
    assert distributed.run(lambda: int(watchdog._thread.dog.seconds), together=True) == 500
    assert watchdog._thread is None
