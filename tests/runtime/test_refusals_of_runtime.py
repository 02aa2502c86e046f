"""What the runtime refuses: sizes, names, links, damaged files, and disks and devices that are full."""

import contextlib
import errno
import io
import os
import resource
import stat
import zipfile
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.refusals import Refusal, each

from mlmoe_jax.config import default_config
from mlmoe_jax.errors import DiskError, UserError
from mlmoe_jax.runtime import distributed, files, memory, preemption, sharding
from mlmoe_jax.runtime.distributed import VARIABLES, find_job
from mlmoe_jax.runtime.files import damage_explained, open_to_append, read_bytes, read_stream
from mlmoe_jax.runtime.formats import read_npz, read_rows
from mlmoe_jax.runtime.registry import Registry
from mlmoe_jax.runtime.setup import setup_jax
from mlmoe_jax.runtime.sharding import find_devices, make_mesh
from mlmoe_jax.runtime.storage import Folder, OutputTarget, atomic_file, atomic_folder, open_output, require_new


# ------------------------------------------------------------------------------------------------ devices and processes
def of_mesh(fsdp: int, expert: int) -> Refusal:
    """These sizes on eight devices."""
    says = f"mesh fsdp={fsdp}, expert={expert} does not fit 8 devices; set at most one of config.mesh.* to -1"
    return Refusal(says[:23], None, lambda at: make_mesh({"fsdp": fsdp, "expert": expert}, np.arange(8)), says)


def of_job(name: str, *values: str) -> Refusal:
    """The variables of a job with these values: the coordinator, the number of processes, the index of this one."""
    given = dict(zip(VARIABLES, values, strict=True))
    given = {variable: value for variable, value in given.items() if value is not None}
    says = [f"{variable}={value}" for variable, value in given.items()]
    return Refusal(name, None, lambda at: find_job(given), *says, "should be HOST:PORT, such as 10.0.0.1:5000, ")


@contextlib.contextmanager
def on_three_devices(at):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlmoe_jax.runtime.setup.make_mesh", lambda sizes, devices: SimpleNamespace(size=3))
        config = default_config()
        config.train.batch_size = 10
        yield config


def without_device(error: Exception, says: str) -> Refusal:
    """A platform of JAX_PLATFORMS that cannot be used."""

    def run(at):
        with pytest.MonkeyPatch.context() as patch:
            known = SimpleNamespace(devices=mock.Mock(side_effect=error), config=SimpleNamespace(jax_platforms="cuda"))
            patch.setattr(sharding, "jax", known)
            find_devices()

    return Refusal(f"no device, {says}", None, run, f"JAX finds no device for JAX_PLATFORMS=cuda ({says}); install the")


def passes(context, error: Exception) -> Refusal:
    """An error that does not concern a context of a disk, a device or signals."""

    def fail(at):
        with context:
            raise error

    return Refusal(f"{type(error).__name__} of something else", None, fail, str(error), error=type(error))


def allocate(at):
    with memory.shortage_explained("do less"):
        jnp.zeros(2**50, jnp.float32).block_until_ready()


DEVICES = [
    *(of_mesh(*sizes) for sizes in [(3, 1), (-1, -1), (16, 1), (16, -1), (0, 1), (-1, 0), (-4, 1), (-8, -1)]),
    without_device(AssertionError(), "it has no plugin"),
    without_device(RuntimeError("libcuda is missing (set JAX_PLATFORMS='' to go on)"), "libcuda is missing"),
    of_job("no coordinator", None, "3", "1"),
    of_job("an empty number", "10.0.0.1:5000", "", "1"),
    of_job("no port", "10.0.0.1", "3", "1"),
    of_job("a port that is too large", "host:70000", "3", "1"),
    of_job("an index that is too large", "10.0.0.1:5000", "3", "3"),
    of_job("a negative index", "10.0.0.1:5000", "3", "-1"),
    of_job("a number in words", "10.0.0.1:5000", "two", "1"),
    Refusal(
        "no coordinator there",
        None,
        lambda at: distributed._wait_for("127.0.0.1:1", 0),
        "cannot reach MLMOE_COORDINATOR=127.0.0.1:1 after 0 s (Connection refused)",
    ),
    Refusal(
        "a batch that the devices do not divide",
        on_three_devices,
        setup_jax,
        "train.batch_size is 10, which is not a multiple of 3, the devices times train.accumulate; set "
        "--config.train.batch_size=9",
    ),
    Refusal("no memory", None, allocate, "the device is out of memory (RESOURCE_EXHAUSTED: ", "); do less"),
    passes(memory.shortage_explained("do less"), jax.errors.JaxRuntimeError("INVALID_ARGUMENT: not about memory")),
    passes(preemption.interruptible(130), ImportError("no numpy")),
]

# ------------------------------------------------------------------------------------------------------------- registry
SHAPES = {
    "circle": "a:Circle",
    "polygon:NAME": "a:Polygon",
    "text": "mlmoe_jax.runtime.text:Hexagon",
    "none": "no_such_module:a",
}


def of_shape(name: str, says: str, error: type[Exception] = UserError) -> Refusal:
    """A name of a shape. That what it stands for is missing is no mistake of the user."""
    return Refusal(f"the shape {name}", None, lambda at: Registry("shape", SHAPES)[name], says, error=error)


NAMES = [
    of_shape("cirkle", "there is no shape 'cirkle'; did you mean 'circle'?"),
    of_shape("zzz", "there is no shape 'zzz'; there are circle, polygon:NAME, text, none"),
    of_shape("polygon:", "there is no shape 'polygon:'; did you mean 'polygon:NAME'?"),
    of_shape("text", "Hexagon", AttributeError),
    of_shape("none", "no_such_module", ModuleNotFoundError),
]


# -------------------------------------------------------------------------------------------------- folders and outputs
def old_file(at) -> Folder:
    Folder(at).write_text("a.txt", "old")
    return Folder(at)


def fail_while_writing(folder: Folder):
    with atomic_file(folder / "a.txt") as partial:
        partial.write_text("ne")
        raise RuntimeError("disk")


def fail_while_filling(at):
    with atomic_folder(at / "new") as partial:
        (partial / "file").write_text("x")
        raise RuntimeError("disk")


def fill(at):
    with atomic_folder(at / "a") as partial:
        (partial / "notes.txt").write_text("x")


@contextlib.contextmanager
def full_disk(at):
    """A file, and a disk on which no file has more than 1,000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    folder = old_file(at)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield folder
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_output(folder: Folder):
    with open_output(OutputTarget(folder / "none/a.csv", "csv")) as file:
        file.write("x\n")


@contextlib.contextmanager
def linked_temporary(at):
    """A link to a file, with the name of the next temporary file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secrets.token_hex", lambda count: "0" * 2 * count)
        (at / "theirs").mkdir()
        (at / "theirs/notes.txt").write_text("precious")
        with atomic_file(at / "a.txt") as partial:
            pass
        partial.symlink_to(at / "theirs/notes.txt")
        yield Folder(at)


def linked(at) -> Folder:
    """A folder behind a link, with links to a file and folder of others, and to nothing."""
    for folder in ("real/b/c", "theirs"):
        (at / folder).mkdir(parents=True)
    (at / "theirs/notes.txt").write_text("precious")
    for link, target in {
        "linked": "real",
        "real/b/out": at / "theirs",
        "real/gone": at / "none",
        "real/a": at / "theirs/notes.txt",
    }.items():
        (at / link).symlink_to(target)
    return Folder(at / "linked")


def outside(name: str, store: bool = False) -> Refusal:
    """The name of a file that is not in the folder."""

    def call(at):
        Folder("gs://bucket/set" if store else at).inside(name)

    says = f"{name!r} does not name a file in the folder {'gs://bucket/set' if store else '{at}'}; give a path below it"
    return Refusal(f"{name!r} in {'a store' if store else 'a folder'}", None, call, says)


def led_out(name: str, real: str) -> Refusal:
    """A name behind a link, and the place to which the link leads."""
    says = f"{{at}}/linked/{name} is a link out of the folder {{at}}/linked, to {{at}}/{real}; replace it by a copy"
    return Refusal(f"{name} leads to {real}", linked, lambda folder: folder.inside(name), says)


FOLDERS = [
    Refusal("a writer that fails", old_file, fail_while_writing, "disk", error=RuntimeError),
    Refusal("a writer of a folder that fails", None, fail_while_filling, "disk", error=RuntimeError),
    Refusal(
        "a folder in place of another", lambda at: Folder(at).write_text("a/file", ""), fill, "not empty", error=OSError
    ),
    Refusal(
        "a full disk",
        full_disk,
        lambda folder: folder.write_text("a.txt", 2000 * "x"),
        "cannot write {at}/a.txt: File too large; free disk space",
        error=DiskError,
    ),
    Refusal(
        "a name that is too long", None, lambda at: Folder(at / ("a" * 300)).writing().__enter__(), "File name too long"
    ),
    Refusal("an output that exists", None, require_new, "{at} already exists; remove it"),
    Refusal("an output that is a link", linked, lambda folder: require_new(folder / "gone"), "/gone already exists"),
    Refusal(
        "an output without a folder",
        None,
        lambda at: require_new(at / "no/a"),
        "there is no local folder {at}/no to write a into",
    ),
    Refusal("an output that cannot be written", old_file, write_output, "cannot write {at}/none/a.csv: "),
    Refusal(
        "a link under a temporary name", linked_temporary, fail_while_writing, "File exists", error=FileExistsError
    ),
    Refusal(
        "a link to append to", linked, lambda folder: open_to_append(folder / "a"), "/a is a symbolic link; remove it"
    ),
    Refusal(
        "no folder to append in", None, lambda at: open_to_append(at / "no/a"), "No such file", error=FileNotFoundError
    ),
    *map(outside, ("..", "../real/eval", "eval/../..", "/etc/passwd", "", "eval//x")),
    outside("../a", store=True),
    led_out("b/out", "theirs"),
    led_out("b/out/notes.txt", "theirs/notes.txt"),
    led_out("gone", "none"),
    Refusal(
        "a link in a folder to write to",
        linked,
        lambda folder: folder.writable_folder("b"),
        "linked/b/out is a link out of",
    ),
    Refusal(
        "a link among all files", linked, lambda folder: list(folder.files()), "is a link out of the folder {at}/linked"
    ),
    passes(files.disk_errors_explained("x"), FileNotFoundError(errno.ENOENT, "No such file")),
    passes(files.disk_errors_explained("x"), ValueError("x")),
    passes(files.disk_errors_explained("x"), DiskError("cannot write a")),
    passes(files.disk_errors_explained("x"), UserError(f"cannot read a: {os.strerror(errno.EACCES)}")),
]


# ---------------------------------------------------------------------------------------------------------------- files
@contextlib.contextmanager
def little_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        yield
    finally:
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000, "in KB"


def of_path(name: str, path: str, says: str, make=None, most: int = 10) -> Refusal:
    """A path that cannot be read, or not as so few bytes."""

    def call(at):
        with little_memory():
            read_bytes(os.path.join(at, path) if make else path, most)

    return Refusal(name, make and (lambda at: make(at / path) and None), call, says, error=OSError)


def read_endless(at):
    with files.open_regular("/proc/self/maps") as file:
        read_stream(file, 4)  # its size is stated as 0


def of_table(text: str) -> Refusal:
    """A table that `row_writer` cannot have written."""

    def read(at):
        with damage_explained("a.csv"):
            read_rows(io.StringIO(text, newline=""))

    return Refusal(f"the table {text!r}", None, read, "a.csv is damaged: ")


def read_arrays(at, **options):
    with little_memory(), damage_explained(at / "a.npz"), open(at / "a.npz", "rb") as file:
        read_npz(file, **options)


def of_member(shape: str, descr: str = "'<f4'") -> Refusal:
    """An npz file with one array of this type and shape, and eight bytes of values."""

    def make(at):
        header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}".encode()
        with zipfile.ZipFile(at / "a.npz", "w") as archive:
            archive.writestr("a.npy", b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + b"\0" * 8)

    return Refusal(f"an array {descr} {shape:.20}", make, read_arrays, "{at}/a.npz is damaged: ")


def no_array(at):
    with zipfile.ZipFile(at / "a.npz", "w") as archive:
        archive.writestr("a.npy", b"")


def arrays(at):
    np.savez_compressed(at / "a.npz", a=np.zeros(1_000_000, np.int8))


def sparse(path):
    path.touch()
    os.truncate(path, 40 << 30)


FILES = [
    of_path("a pipe", "x", "it is not a regular file", os.mkfifo),
    of_path("a socket", "x", "No such device", lambda path: os.mknod(path, stat.S_IFSOCK | 0o600)),
    of_path("a device", "/dev/zero", "it is not a regular file"),
    of_path("a folder", "/", "Is a directory"),
    of_path("a long name", "x" * 5000, "File name too long"),
    of_path("a name with NUL", "a\0b", "no file can have this name"),
    of_path("a name with a surrogate", "\ud800", "no file can have this name"),
    of_path("an unknown store", "nosuchstore://x/y", ""),
    of_path("more bytes than the limit", "x", "more than 4 bytes", lambda path: path.write_bytes(b"12345"), most=4),
    of_path("more bytes than memory", "x", "more than 536,870,912 bytes", sparse, most=files.MOST_TEXT),
    Refusal("more bytes than stated", None, read_endless, "more than 4 bytes", error=OSError),
    *map(of_table, ('"open', "a,b\n1\n", "a\n1,2\n")),
    *map(of_member, ("(1000000000000,)", "(10**23,)", "(" * 3000, "(-4,)", "(0, 1000000000000)", "(3,)")),
    *(of_member("(1,)", descr) for descr in ("'|O'", "'<U999999999'", "[('a', '<f4')]")),
    Refusal("a member that is no array", no_array, read_arrays, "'a' is not an array"),
    Refusal("a bomb", arrays, lambda at: read_arrays(at, usual=0), "would unpack to 1,000,128 bytes"),
]


@each([*DEVICES, *NAMES, *FOLDERS, *FILES])
def test_refusals(case, tmp_path):
    case.check(tmp_path)
