"""What a run folder refuses, and its files × what can happen to them."""

import contextlib
import errno
import io
import json
import os
import shutil
import sys
from types import SimpleNamespace
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny
from helpers.checkpoints import damage, make_state, save_steps
from helpers.refusals import CUT, EMPTY, Refusal, damaged, each
from helpers.runs import CLASSES

from mlmoe_jax.config import default_config
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.errors import DiskError, UserError
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.runs.assemble import abstract_parts, assemble, preprocess_for
from mlmoe_jax.runs.checkpoint import open_manager, restore
from mlmoe_jax.runs.folder import RunFolder, read_config
from mlmoe_jax.runs.metric_log import MetricLog
from mlmoe_jax.runs.restore import open_run, require_same_frozen
from mlmoe_jax.runs.trackers import EventFiles, open_trackers, require_trackers
from mlmoe_jax.runs.uploads import Uploads

SPACE = synthetic_label_space(len(CLASSES), 1)


# ------------------------------------------------------------------------------------------------------- writing a run
def write(folder: RunFolder) -> None:
    with folder.writing():
        pass


def write_checkpoints(folder: RunFolder) -> None:
    with open_manager(folder):
        pass


@contextlib.contextmanager
def patched(name: str, value, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(name, value)
        yield folder


@contextlib.contextmanager
def in_use(at):
    folder = RunFolder(at / "run")
    with folder.writing():
        yield RunFolder(folder.path)


def linked(link: str, name: str, call, *says: str) -> Refusal:
    """A call on a run folder in which `link` leads to a folder of others."""

    def make(at) -> RunFolder:
        folder = RunFolder(at / "run")
        (at / "theirs").mkdir()
        folder.write_text("config.json", "{}")
        (folder / link).parent.mkdir(parents=True, exist_ok=True)
        os.symlink(at / "theirs", folder / link)
        return folder

    says = says or (
        f"{{at}}/run/{link} is a link out of the run folder {{at}}/run, to {{at}}/theirs; replace it by a copy",
    )
    return Refusal(f"{name} through a link at {link}", make, call, *says)


def a_file(at):
    (at / "file").write_text("")


def of_path(below: str, call, reason: str) -> Refusal:
    """A path with a file in place of a folder."""
    says = f"cannot make the run folder {{at}}/{below}: {reason}"
    return Refusal(f"{call.__name__} at {below}", a_file, lambda at: call(RunFolder(at / below)), says)


def of_store(call, *arguments: str) -> Refusal:
    """A run folder in a store without the library of the store."""
    make = lambda at: patched("importlib.util.find_spec", lambda name: None, RunFolder("gs://bucket/run"))  # noqa: E731
    says = "run folders at gs:// need the package gcsfs: pip install gcsfs"
    return Refusal(f"{call.__name__} in a store", make, lambda folder: call(folder, *arguments), says)


@contextlib.contextmanager
def with_tracker(at, name: str, module):
    """A folder, and a config with a tracker whose package is `module`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, module)
        config = default_config()
        require_trackers(config)
        config.log[name] = "images"
        yield RunFolder(at), config


def no_answer(*_):
    raise ConnectionError("no answer.\nTraceback of the server")


def upload(at):
    files = Uploads(no_answer)
    files.add("b.txt", lambda: b"")
    files.send()


def write_row(at):
    def refuse(metrics):
        raise UserError(f"the loss is {metrics['loss']}")

    log = MetricLog(RunFolder(at), lambda step: 0.1, steps_per_epoch=4, require=refuse)
    log.note(8, {"loss": jnp.float32(0.5)}, SimpleNamespace(speed=dict))
    log.write()


def of_config(name: str, call, says: str, **keys) -> Refusal:
    """A config with these keys."""

    def make(at):
        config = default_config()
        config.update_from_flattened_dict({key.replace("__", "."): value for key, value in keys.items()})
        return config

    return Refusal(name, make, call, says)


WRITING = [
    Refusal(
        "a second writer", in_use, write, "another process is writing to {at}/run; wait for it or name another folder"
    ),
    *(of_path(below, RunFolder.require_creatable, "{at}/file is a file") for below in ("file", "file/a/run")),
    of_path("file", write, "File exists"),
    of_path("file/a/run", write, "Not a directory"),
    Refusal(
        "a folder that is not writable",
        lambda at: patched("os.access", lambda path, how: False, RunFolder(at / "new/run")),
        RunFolder.require_creatable,
        "cannot make the run folder {at}/new/run: {at} is not writable",
        error=DiskError,
    ),
    of_store(RunFolder.require_creatable),
    of_store(RunFolder.require, "config.json"),
    linked(".lock", "writing", write, "cannot lock {at}/run: Too many levels of symbolic links; remove {at}/run/.lock"),
    linked(".lock", "looking", RunFolder.is_in_use, "Too many levels of symbolic links; remove {at}/run/.lock"),
    *(
        Refusal(
            f"a disk without locks, {type(error).__name__}",
            lambda at, error=error: patched(
                "mlmoe_jax.runtime.storage.FileLock.acquire", mock.Mock(side_effect=error), RunFolder(at)
            ),
            write,
            f"cannot lock {{at}}: {reason}; name a folder on a disk that has locks",
        )
        for error, reason in (
            (OSError(errno.ENOLCK, "No locks available"), "No locks available"),
            (NotImplementedError("it has no flock"), "it has no flock"),
        )
    ),
    linked("samples", "writing", lambda folder: folder.write_text("samples/new.json", "{}")),
    linked("prune/levels/b", "a run below", lambda folder: folder.below("prune/levels/b")),
    linked("samples", "adopting", RunFolder(os.devnull).adopt),
    linked("checkpoints", "checkpoints", write_checkpoints),
    linked("checkpoints/3", "checkpoints", write_checkpoints),
    linked("tensorboard", "events", lambda folder: EventFiles(folder, 0)),
    linked("tensorboard/events", "events", lambda folder: EventFiles(folder, 0)),
    *(
        Refusal(
            f"no {name}",
            lambda at, name=name: with_tracker(at, name, None),
            lambda given: require_trackers(given[1]),
            f"log.{name}=images needs ",
        )
        for name in ("wandb", "mlflow")
    ),
    Refusal(
        "a wrong address",
        lambda at: with_tracker(at, "mlflow", SimpleNamespace(set_tracking_uri=no_answer)),
        lambda given: open_trackers(*given, 0),
        "log.mlflow=images cannot be used (no answer)",
    ),
    Refusal("an upload that fails", None, upload, "cannot upload b.txt: no answer"),
    Refusal("rejected metrics", None, write_row, "the loss is 0.5"),
    of_config(
        "a size that does not fit",
        preprocess_for,
        "data.image_size is 100, which is not a multiple of convnext_tiny's patch size 32",
        data__image_size=100,
        model__backbone__name="convnext_tiny",
    ),
    of_config(
        "no parameter that trains",
        lambda config: abstract_parts(config, SPACE),
        "config.trainable freezes every parameter; leave at least the head trainable",
        trainable=((r"", False),),
    ),
]


@each(WRITING)
def test_refusals(case, tmp_path):
    case.check(tmp_path)


# ------------------------------------------------------------------------------------------------------- reading a run
@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    save_steps(RunFolder(folder), 3, 5, 8)
    return folder


def model(at) -> RunFolder:
    return RunFolder(at / "model")


def of_model(name: str, says: str, *overrides: tuple[str, str], without: str = "", which: str = "best") -> Refusal:
    """A run without a folder, or opened with these overrides or this checkpoint."""

    def make(at) -> RunFolder:
        if without:
            shutil.rmtree(at / without)
        return model(at)

    return Refusal(name, make, lambda folder: open_run(folder, overrides, which=which), says)


@contextlib.contextmanager
def other_weights(at):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLMOE_CACHE", str(at / "cache"))
        tiny.write_weights(at / "cache" / "tiny.safetensors", catalog.entry("tiny"), seed=6)
        yield model(at)


def of_steps(
    name: str, says: str, damages: dict[int, str], step: int | None = None, size: int = 600, **options
) -> Refusal:
    """Checkpoints of the steps 3, 5 and 8, of which an item is damaged."""

    def make(at) -> RunFolder:
        for each_step, item in damages.items():
            damage(RunFolder(at / "steps"), each_step, item)
        return RunFolder(at / "steps")

    def call(folder):
        state = make_state(0, size=size)
        with open_manager(folder, **options) as manager:
            restore(manager, selected=state.ema, state=state if step is None else None, step=step)

    return Refusal(name, make, call, says)


READING = [
    of_model(
        "no run folder", "there is no run folder {at}/model; give the --workdir of a finished or", without="model"
    ),
    of_model(
        "another type",
        "--config.model.dtype cannot differ from the trained run's; leave it out",
        ("model.dtype", "bfloat16"),
    ),
    of_model("another calibration", "has no effect on a trained model", ("calibration.method", "platt")),
    of_model("a wrong threshold", "the config has mistakes: eval.threshold is 2", ("eval.threshold", "2")),
    of_model(
        "no checkpoint",
        "{at}/model holds no finished checkpoint yet; rerun its training command to resume it",
        without="model/checkpoints/30",
    ),
    of_model(
        "no checkpoints",
        "{at}/model is not the run folder of a training: it has no checkpoints",
        without="model/checkpoints",
    ),
    *(
        of_model(
            f"the checkpoint {which!r}",
            f"--checkpoint={which} is not best, latest, raw or the step of a checkpoint",
            which=which,
        )
        for which in ("last", "-1", "1.5", "", "٣")
    ),
    Refusal(
        "other published weights",
        other_weights,
        open_run,
        "the frozen weights of tiny (auto) differ from the weights that {at}/model was trained with; put ",
    ),
    Refusal(
        "a training with other weights",
        model,
        lambda folder: require_same_frozen(folder, assemble(read_config(folder), SPACE, load_backbone=False)),
        "differ from the weights that {at}/model was trained with; put",
    ),
]

# What can happen to a file with an object in JSON, or with arrays.
KINDS = {
    "not UTF-8": b"\xff\xfe",
    "without end": b"[" * 100_000,
    "empty": EMPTY,
    "a number": b"5",
    "a list": b"[]",
    "null": b"null",
    "half": CUT,
    "another object": b'{"x": 1}',
}
FILES = ("config.json", "backbone.json", "preprocess.json", "label_space.npz")


def of_file(file: str, name: str, how, says: str = "") -> Refusal:
    """A file of a run, after something has happened to it."""
    return damaged(f"{file} {name}", model, f"model/{file}", how, open_run, f"{{at}}/model/{file} is damaged: {says}")


def of_value(key: str, value) -> Refusal:
    """The preprocessing, with another value of a key."""
    how = lambda content: json.dumps(json.loads(content) | {key: value}).encode()  # noqa: E731
    return of_file("preprocess.json", f"with {key} {value}", how)


def of_array(name: str, change, says: str = "") -> Refusal:
    """A label space with an array that a function has changed."""

    def how(content: bytes) -> bytes:
        buffer, arrays = io.BytesIO(), dict(np.load(io.BytesIO(content)))
        np.savez(buffer, **arrays | {name: change(arrays[name])})
        return buffer.getvalue()

    return of_file("label_space.npz", f"with other {name}{says}", how, says)


DAMAGE = [
    *(of_file(file, kind, how) for file in FILES for kind, how in KINDS.items()),
    of_value("mean", [0.5]),
    of_value("mean", None),
    of_value("std", [0.5, 0.5, "x"]),
    of_value("std", [0.5, 0.5, 0]),
    of_value("mean", [0.5, 0.5, float("nan")]),
    *(of_array(name, lambda array: array[:-1]) for name in ("names", "positives", "co_group", "dc_group")),
    of_array("together", lambda array: np.array([[len(CLASSES)], [0], [1]])),
    of_array("names", lambda array: array[:0], "it has no labels"),
    of_array("co_group", lambda array: array + 99, "its groups should be below "),
    of_file("frozen.safetensors", "without tensors", b"{}"),
]


@each([*READING, *DAMAGE])
def test_a_model_that_is_refused(case, run, tmp_path):
    run("published").copy(tmp_path / "model")
    case.check(tmp_path)


STEPS = [
    of_steps("no such step", "/checkpoints has checkpoints of steps 3, 5, 8, not of 6", {}, step=6),
    of_steps(
        "a damaged step",
        "checkpoint 5 in {at}/steps/checkpoints is damaged; name another one of steps 3, 8, or leave --checkpoint out",
        {5: "selected"},
        step=5,
        writing=False,
    ),
    of_steps(
        "only damaged steps",
        "every checkpoint in {at}/steps/checkpoints is damaged (8, 5, 3); restore a copy",
        {3: "state", 5: "state", 8: "selected"},
    ),
    of_steps("a model of another shape", "is damaged", {}, size=5),
    damaged(
        "metadata without end",
        lambda at: RunFolder(at / "steps"),
        "steps/checkpoints/8/_CHECKPOINT_METADATA",
        b"[" * 100_000,
        write_checkpoints,
        "a _CHECKPOINT_METADATA in {at}/steps/checkpoints is damaged: ",
    ),
]


@each(STEPS)
def test_steps_that_are_refused(case, steps, tmp_path):
    shutil.copytree(steps, tmp_path / "steps")
    case.check(tmp_path)
