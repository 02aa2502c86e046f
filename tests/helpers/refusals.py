"""Refusals as a table: what is given, what is called with it, and what the one sentence says.

REFUSALS = [
    Refusal("an empty table", lambda at: write(at, "train.csv", ""), open_train, "train.csv is empty"),
    damaged("cut scores", made_run, "scores/val.npz", CUT, stored_scores, "val.npz", "is damaged"),
]

@each(REFUSALS)
def test_refusals(case, tmp_path):
    case.check(tmp_path)
"""

import contextlib
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from helpers.commands import assert_sentence, refused
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.storage import LOCK

# What can happen to the content of a file.
EMPTY: Callable[[bytes], bytes] = lambda content: b""  # noqa: E731
CUT: Callable[[bytes], bytes] = lambda content: content[: len(content) // 2]  # noqa: E731
GONE: Callable[[bytes], None] = lambda content: None  # noqa: E731

LARGE = 2**24  # bytes, above which only the size of a file is compared


def replacing(old: str, new: str) -> Callable[[bytes], bytes]:
    """Return a damage: the first `old` of a file, which has to be there, becomes `new`."""

    def replace(content: bytes) -> bytes:
        assert old.encode() in content
        return content.replace(old.encode(), new.encode(), 1)

    return replace


class Refusal:
    """A call that ends in one sentence and leaves every file as it was.

    Args:
      name: the name of the case.
      make: writes what is given into an empty folder, and returns what `call` takes, by default the folder. A context
        manager is left after the call. None: nothing is written.
      call: raises the error.
      says: parts of the sentence, each with `{at}` for the folder.
      error: the kind of the error.
      writes: whether the call may write files before it is refused.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[Path], object] | None,
        call: Callable[[object], object],
        *says: str,
        error: type[Exception] = UserError,
        writes: bool = False,
    ):
        self.name, self.make, self.call, self.says, self.error, self.writes = name, make, call, says, error, writes

    def check(self, folder: Path) -> str:
        """Make the call; return the sentence."""
        made = self.make(folder) if self.make else None
        entered = isinstance(made, contextlib.AbstractContextManager) and not isinstance(made, Path)  # one before 3.13
        with made if entered else contextlib.nullcontext(made) as given:
            before = contents(folder)
            with pytest.raises(self.error) as caught:
                self.call(folder if given is None else given)
            text = assert_sentence(str(caught.value))
            for part in self.says:
                assert part.replace("{at}", str(folder)) in text
            assert self.writes or contents(folder) == before, "a refused call has changed files"
        return text


def damaged(
    name: str,
    make: Callable[[Path], object],
    file: str,
    how: Callable[[bytes], bytes | None] | bytes | str,
    *rest,
    **options,
) -> Refusal:
    """Return the refusal of what `make` writes, after something happened to the content of one of its files.

    Args:
      name: the name of the case.
      make: writes something complete.
      file: the file, relative to the folder. A name with * is a pattern.
      how: what becomes of its content, or the new content. None: the file is removed.
      *rest: `call` and `says` of the refusal.
      **options: options of the refusal.
    """

    def make_and_damage(folder: Path) -> object:
        given = make(folder)
        path = next(folder.glob(file)) if "*" in file else folder / file
        content = how(path.read_bytes()) if callable(how) else how
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return given

    return Refusal(name, make_and_damage, *rest, **options)


def each(cases: Iterable[Refusal]) -> pytest.MarkDecorator:
    """Return the mark of a test of each `case`."""
    cases = list(cases)
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), f"two cases are named {max(names, key=names.count)}"
    return pytest.mark.parametrize("case", cases, ids=names)


def contents(folder: Path) -> dict[str, bytes | int | None]:
    """Return the content of every file below a folder, by its name; of a large file its size, and of a folder None.

    Without the locks, which a call that is refused later may take.
    """

    def content(path: Path) -> bytes | int | None:
        if path.is_symlink() or not path.is_file():
            return None
        size = path.stat().st_size
        return size if size > LARGE else path.read_bytes()

    return {str(path.relative_to(folder)): content(path) for path in folder.rglob("*") if path.name != LOCK}


def run_command(*arguments: str) -> int:
    """Run the program in this process, and raise the sentence with which it is refused."""
    from mlmoe_jax.main import main

    with contextlib.redirect_stderr(io.StringIO()) as shown:
        try:
            code = main(list(arguments))
        except UserError as error:
            raise AssertionError("the program has raised what it should print") from error
    if code != 2:
        assert not any(line.startswith("error: ") for line in shown.getvalue().splitlines())
        return code
    raise UserError(refused(CompletedProcess(arguments, code, "", shown.getvalue())).removeprefix("error: "))
