"""Requests to stop: signals, notices of maintenance, and the agreement of several processes."""

import gc
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from mlmoe_jax.runtime import distributed, preemption, progress
from mlmoe_jax.runtime.preemption import stop_requests


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_becomes_a_request(number):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with stop_requests() as asked:
        assert not asked.agreed()
        os.kill(os.getpid(), number)
        assert asked.wait(5)
        assert asked.agreed()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def ask(number=signal.SIGTERM):
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # the interpreter handles signals between instructions


def test_a_second_ctrl_c_interrupts_at_once():
    before = signal.getsignal(signal.SIGINT)
    with stop_requests():
        ask(signal.SIGTERM)
        ask(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            ask(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


def test_outside_the_main_thread_signals_are_left_alone():
    seen = []

    def work():
        with stop_requests() as asked:
            seen.append(asked.is_set())

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
    assert signal.getsignal(signal.SIGTERM) == before


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
    monkeypatch.setattr("jax.config", SimpleNamespace(jax_enable_preemption_service=enabled))
    with stop_requests() as asked:
        assert [asked.agreed() for _ in range(3)] == stops
    with stop_requests() as asked:
        asked.agreed()
    assert calls == list(range(calls[0], calls[0] + 4)) if enabled else not calls


def test_a_request_after_the_last_step_is_shared(monkeypatch):
    monkeypatch.setattr(distributed, "gather", lambda value: [value, True])
    with stop_requests() as asked:
        assert asked.agreed_at_end()


@pytest.fixture(autouse=True)
def no_exit(monkeypatch):
    """A handler that would end the process raises instead, so that one late unwinding does not end the test run."""

    def refuse(code):
        raise AssertionError(f"os._exit({code})")

    monkeypatch.setattr(os, "_exit", refuse)


def interrupted(command, **options) -> list:
    """Expect that a command is interrupted; return what it has appended to the list that it gets."""
    reached = []
    with pytest.raises(KeyboardInterrupt), preemption.interruptible(130, **options):
        command(reached)
    return reached


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("safe_point", [lambda: progress.status("reading"), progress.heartbeat, lambda: None])
def test_a_command_ends_at_the_next_safe_point(number, safe_point):
    """The end of the command is one."""

    def command(reached):
        ask(number)
        reached.append("line after the signal")
        safe_point()

    before = signal.getsignal(number)
    assert interrupted(command) == ["line after the signal"]
    assert signal.getsignal(number) == before
    safe_point()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # what Python ignores
def test_a_signal_in_a_callback_is_not_lost():
    """Python ignores what a callback of the garbage collector raises."""
    signals = [signal.SIGTERM, signal.SIGINT]  # the handler raises at the second one
    gc.callbacks.append(lambda phase, info: ask(signals.pop()) if signals else None)
    try:
        interrupted(lambda _: gc.collect())
    finally:
        gc.callbacks.pop()
    assert not signals


def test_without_a_safe_point_a_command_is_interrupted_where_it_is():
    def command(reached):
        ask()
        reached.append("first")
        time.sleep(30 if len(asks) > 1 else 0)
        ask()
        reached.append("second")

    asks = ["after a time", "by a second signal"]
    assert interrupted(command, patience=0.5) == ["first"]
    asks.pop()
    assert interrupted(command) == ["first"]


def test_the_initialization_of_an_extension_module_is_not_interrupted(monkeypatch):
    """Code in C, such as jaxlib's, can crash if a callback into Python raises."""

    def initialize(reached):
        ask()
        ask()
        reached.append("initialized")

    def command(reached):
        initialize(reached)
        time.sleep(30)

    monkeypatch.setattr(preemption, "_EXTENSION_CODE", {initialize.__code__})
    assert interrupted(command) == ["initialized"]


def test_the_code_that_initializes_an_extension_module_is_known():
    spec = importlib.util.spec_from_file_location("_struct", importlib.util.find_spec("_struct").origin)
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(preemption._initializes_extension(frame)))
    try:
        spec.loader.exec_module(spec.loader.create_module(spec))
    finally:
        sys.setprofile(None)
    assert any(calls)
    assert not preemption._initializes_extension(sys._getframe())


def test_an_exception_in_place_of_the_interrupt_is_an_interrupt_too():
    def command(reached):
        try:
            ask()
            ask()
        except KeyboardInterrupt as interrupt:  # as libraries do around an import
            raise ImportError("numpy failed to import") from interrupt

    assert interrupted(command) == []


@pytest.mark.parametrize(("signals", "patience"), [(1, 0.05), (3, 60)])
def test_a_command_that_goes_on_ends_after_a_time_and_at_a_third_signal(signals, patience):
    program = f"""
import os, signal, time
from mlmoe_jax.runtime.preemption import interruptible
waits = [*{signals} * [lambda: os.kill(os.getpid(), signal.SIGINT)], lambda: time.sleep(30)]
with interruptible(130, patience={patience}):
    while True:
        try:
            (waits.pop(0) if len(waits) > 1 else waits[0])()
        except BaseException:
            pass
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20)
    assert (ended.returncode, ended.stderr) == (130, "")


def test_other_threads_are_not_interrupted():
    def command(reached):
        ask()
        with ThreadPoolExecutor(1) as pool:
            reached.append(pool.submit(preemption.stop_if_requested).result())

    assert interrupted(command) == [None]
