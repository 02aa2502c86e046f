"""What the tests of the package (tests/) and of its tools (tools/tests/) share: switches, environment and budget."""

import atexit
import gc
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

# Threads for a few rows wait longer for a core, which the other worker has too, than they compute.
for library in ("OMP", "OPENBLAS"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

from helpers.shapes import check_shapes  # noqa: E402

check_shapes()

from helpers.devices import UNOPTIMIZED  # noqa: E402
from helpers.lowering import share_contexts, shorten_errors  # noqa: E402
from helpers.paths import REPOSITORY  # noqa: E402

os.environ.setdefault("XLA_FLAGS", UNOPTIMIZED)

# The cache of the user is not used. Compiled programs and rendered scenes are kept for the next test run, unless the
# programs have become too large. The first process creates the folders; all others find them in the environment.
PROGRAMS, MOST_BYTES = REPOSITORY / ".tests-cache", 2**31
if "MLMOE_TESTS_CACHE" not in os.environ:
    os.environ["MLMOE_TESTS_CACHE"] = tempfile.mkdtemp(prefix="mlmoe-tests-")
    atexit.register(shutil.rmtree, os.environ["MLMOE_TESTS_CACHE"], ignore_errors=True)
    os.environ["MLMOE_CACHE"] = f"{os.environ['MLMOE_TESTS_CACHE']}/made"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(PROGRAMS)
    if PROGRAMS.exists() and sum(file.stat().st_size for file in os.scandir(PROGRAMS)) > MOST_BYTES:
        shutil.rmtree(PROGRAMS)
    (PROGRAMS / "scenes").mkdir(parents=True, exist_ok=True)
    Path(os.environ["MLMOE_CACHE"]).mkdir()
    Path(os.environ["MLMOE_CACHE"], "digits-v1").symlink_to(PROGRAMS / "scenes")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

gc.set_threshold(50_000, 20, 50)  # the objects of thousands of programs are visited less often
os.environ["MLMOE_OFFLINE"] = "1"  # no test, and no program that one starts, fetches weights from the network


@pytest.hookimpl(trylast=True)
def pytest_sessionstart():
    """Ignore what a checkpoint that cannot be read leaves behind, as commands do.

    pytest would format it first, in the middle of whatever runs then, and ignore it only afterwards.
    """
    from mlmoe_jax.apps.cli.process import ignore_leftovers

    sys.unraisablehook = ignore_leftovers(sys.unraisablehook)


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also run the tests marked slow, and those of tools/")
    parser.addoption(
        "--optimized", action="store_true", help="compile as users do, and print the differences from other packages"
    )


def pytest_configure(config):
    if config.getoption("--optimized"):
        os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace(UNOPTIMIZED, "")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Look for garbage only after the collection, and not among what it has made."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    share_contexts()
    shorten_errors()
    return result


def pytest_collection_modifyitems(config, items):
    """Leave slow tests out without --all; they are deselected, since skipped tests are those that cannot run here.

    The longest files come first, so that no worker waits for one of them at the end.
    """
    items.sort(key=lambda item: not item.nodeid.startswith("tests/training/"))
    if not config.getoption("--all"):
        kept, slow = [], []
        for item in items:
            (slow if is_slow(item) else kept).append(item)
        config.hook.pytest_deselected(items=slow)
        items[:] = kept


def is_slow(item: pytest.Item) -> bool:
    """Return whether a test runs only with --all, by its place or one of the markers `slow` and `variants`."""

    def varies(mark: pytest.Mark) -> bool:
        params = item.callspec.params
        if unknown := {*mark.args, *mark.kwargs} - params.keys():
            raise pytest.UsageError(f"{item.nodeid} has no argument {unknown.pop()}, which its marker variants names")
        others = any(params[name] not in values for name, values in mark.kwargs.items())
        return others or not all(has_first_value(item, name) for name in mark.args)

    of_tools = item.nodeid.startswith("tools/")
    return of_tools or "slow" in item.keywords or any(map(varies, item.iter_markers("variants")))


def has_first_value(item: pytest.Item, name: str) -> bool:
    """Return whether an argument of a test has the first value that its `parametrize` or its fixture gives."""
    for mark in item.iter_markers("parametrize"):
        names, values = mark.args
        names = [one.strip() for one in names.split(",")] if isinstance(names, str) else [*names]
        if name in names:
            first = ParameterSet.extract_from(next(iter(values)), force_tuple=len(names) == 1)
            return item.callspec.params[name] is first.values[names.index(name)]
    return item.callspec.indices[name] == 0  # a fixture; of arguments, pytest counts combinations


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
def pytest_runtest_teardown(item):
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


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """The runs that tests share (`helpers/runs.py`), for fixtures of modules."""
    from helpers.runs import Runs

    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def run(runs):
    """A function that returns a run that tests share, by its kind and stage: see `helpers/runs.py`."""
    with runs.world():
        yield runs
    runs.require_unchanged()


@pytest.fixture
def tiny_vit(monkeypatch):
    """Make `vit_digits` a ViT of two narrow blocks and four patches, without published weights."""
    from helpers import tiny

    tiny.use_vit(monkeypatch, patch=32)
