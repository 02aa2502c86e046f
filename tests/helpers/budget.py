"""What a test may take and leave behind: its budget of processor time, and no timer."""

import resource
import threading
import time

import pytest

from helpers.selection import is_slow


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fail a test that takes twice its budget: 10 seconds of processor time, unless its marker `budget` says otherwise.

    Processor time, of the test and the processes that it starts, depends little on what else the machine does. Shared
    cores can still double it.
    """
    before = processor_seconds()
    result = yield
    budget = next((mark.args[0] for mark in item.iter_markers("budget")), 10)
    if not is_slow(item) and (seconds := processor_seconds() - before) > 2 * budget:
        pytest.fail(f"it took {seconds:.1f} seconds of processor time; mark it slow, or budget(SECONDS) with a reason")
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown():
    """Fail a test that leaves a timer, which would act or speak in the middle of another test."""
    result = yield
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    if left := [timer for timer in timers if not timer.finished.wait(0.5)]:
        for timer in left:
            timer.cancel()
        pytest.fail(f"it leaves timers: {[(timer.function, timer.args) for timer in left]}")
    return result


def processor_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
