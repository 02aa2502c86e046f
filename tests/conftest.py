"""Shared by all tests: the `--all` switch, the real sample images, and a check that an error is one plain sentence."""

import atexit
import gc
import os
import resource
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from helpers.shapes import check_shapes

check_shapes()

from helpers import twins  # noqa: E402
from helpers.paths import REPOSITORY  # noqa: E402
from helpers.refusals import assert_sentence  # noqa: E402

from mlmoe_jax.errors import UserError  # noqa: E402

# Most of the time of a test goes into compiling tiny models; unoptimized, they compile in half of it.
UNOPTIMIZED = "--xla_backend_optimization_level=0"
os.environ.setdefault("XLA_FLAGS", UNOPTIMIZED)

# The cache of the user is not used. Compiled programs and rendered scenes are kept for the next test run, unless the
# programs have become too large. The first process creates the folders; all others find them in the environment.
PROGRAMS, MOST_BYTES = REPOSITORY / ".tests-cache", 2**31
if "MLMOE_TESTS_CACHE" not in os.environ:
    os.environ["MLMOE_TESTS_CACHE"] = tempfile.mkdtemp(prefix="mlmoe-tests-")
    atexit.register(shutil.rmtree, os.environ["MLMOE_TESTS_CACHE"], ignore_errors=True)
    os.environ["MLMOE_CACHE"] = f"{os.environ['MLMOE_TESTS_CACHE']}/made"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(PROGRAMS)
    if PROGRAMS.exists() and sum(file.stat().st_size for file in PROGRAMS.iterdir()) > MOST_BYTES:
        shutil.rmtree(PROGRAMS)
    (PROGRAMS / "scenes").mkdir(parents=True, exist_ok=True)
    Path(os.environ["MLMOE_CACHE"]).mkdir()
    Path(os.environ["MLMOE_CACHE"], "digits-v1").symlink_to(PROGRAMS / "scenes")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

gc.set_threshold(50_000, 20, 50)  # the objects of thousands of programs are visited less often
os.environ["MLMOE_OFFLINE"] = "1"  # no test, and no program that one starts, fetches weights from the network


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also run the tests marked slow")
    parser.addoption(
        "--optimized", action="store_true", help="compile as users do, and print the differences from other packages"
    )


def pytest_configure(config):
    if config.getoption("--optimized"):
        os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace(UNOPTIMIZED, "")


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("--optimized"):
        terminalreporter.section("largest differences, relative to the largest entry of the reference")
        for test, value in sorted(twins.LARGEST.items()):
            terminalreporter.write_line(f"{value:.1e}  {test}")


def pytest_collection_modifyitems(config, items):
    """Leave slow tests out without --all; they are deselected, since skipped tests are those that cannot run here."""
    if not config.getoption("--all"):
        config.hook.pytest_deselected(items=[item for item in items if is_slow(item)])
        items[:] = [item for item in items if not is_slow(item)]


def is_slow(item: pytest.Item) -> bool:
    """Return whether a test runs only with --all, by one of the markers `slow` and `variants`."""

    def varies(mark: pytest.Mark) -> bool:
        case = item.callspec
        if unknown := {*mark.args, *mark.kwargs} - case.params.keys():
            raise pytest.UsageError(f"{item.nodeid} has no argument {unknown.pop()}, which its marker variants names")
        others = any(case.params[name] not in values for name, values in mark.kwargs.items())
        return others or any(case.indices[name] for name in mark.args)

    return "slow" in item.keywords or any(map(varies, item.iter_markers("variants")))


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


def processor_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with real VOC and COCO images in their published layouts, which are not part of the repository."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the sample images, ../shared/data, are not part of the repository and not here")
    return folder


@pytest.fixture
def precious(tmp_path_factory):
    """A file of the user's in a folder of its own, which nothing may change."""
    path = tmp_path_factory.mktemp("precious") / "notes.txt"
    path.write_text("precious")
    yield path
    assert [(found, found.read_text()) for found in path.parent.iterdir()] == [(path, "precious")]


@pytest.fixture
def refusal():
    """A function that makes a call, expects UserError with one sentence, and returns the sentence."""

    def call(function, *args, error=UserError, **options) -> str:
        with pytest.raises(error) as caught:
            function(*args, **options)
        return assert_sentence(str(caught.value))

    return call


@pytest.fixture
def tiny_vit(monkeypatch):
    """Make `vit_digits` a ViT of two narrow blocks and four patches, without published weights."""
    from helpers import tiny

    tiny.use_vit(monkeypatch, patch=32)


@pytest.fixture
def unreadable_image(monkeypatch):
    """Image 3 of every split in memory cannot be read, until this function is called."""
    from mlmoe_jax.data.images import ArrayImages, BadImage

    read = ArrayImages.read

    def sometimes(self, row, decoding=None):
        if row == 3:
            raise BadImage("cannot read image 3 as an image: it is empty")
        return read(self, row)

    monkeypatch.setattr(ArrayImages, "stamp", lambda self, row: str(row))
    monkeypatch.setattr(ArrayImages, "read", sometimes)
    return lambda: monkeypatch.setattr(ArrayImages, "read", read)


@pytest.fixture
def drawn_parts():
    """A function that builds the model of a config with values drawn in numpy, which compiles nothing."""
    from helpers.bench import drawn_model

    from mlmoe_jax.runs.assemble import split_model

    return lambda config, label_space: split_model(drawn_model(config, label_space), config)


@pytest.fixture
def two_steps(drawn_parts):
    """A function that takes two training steps of a config on four made-up images and their labels.

    Returns the state before, as numpy, the state after, and the metrics of the last step.
    """
    import jax
    import numpy as np
    from helpers.bench import Bench, drawn_batch

    from mlmoe_jax.data.labels.space import synthetic_label_space
    from mlmoe_jax.data.prepare import Preprocess
    from mlmoe_jax.runtime.sharding import make_mesh

    def run(config):
        prompts = config.model.prompts
        prompts.count, prompts.num_groups, prompts.per_group = 3, 2, 2
        config.optim.schedule, config.optim.learning_rate, config.ema.decay = "constant", 1e-2, 0.9
        parts = drawn_parts(config, synthetic_label_space(4, 2))
        bench = Bench(config, parts, Preprocess(64, (0.5,) * 3, (0.25,) * 3), make_mesh(config.mesh), 4)
        before, batch = jax.device_get(bench.start()), drawn_batch(4, 64, 4)
        batch["label"] = np.array([[1, 0, 0, 1], [0, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1]], np.float32)
        state, log = bench.run(batch, 2)
        assert np.isfinite(log[-1]["loss"])
        return before, state, log[-1]

    return run
