"""Used + said = given: the oracle of tables and folders of users.

Input is opened as a training and as `mlmoe data` open it. Each image that was given is in a split with a meaning that
it may have, or a sentence counts it, or the whole input is refused with a sentence that names what is wrong. Nothing
of the package is used to decide this: an image is recognized by its color.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import itertools
import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from random import Random

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from mlmoe_jax.data.decoding import BadImage
from mlmoe_jax.data.images import ImageNames
from mlmoe_jax.errors import UserError
from tools.fuzz.given import KINDS, LABELS, Draft, Oddity, nfc, number_of, plain, write
from tools.fuzz.hostile import Case, Silent
from tools.fuzz.oddities import CHANGES

SHARES = {"csv": 8, "wide": 3, "jsonl": 3, "folders": 6, "coco_json": 2, "sidecar": 3, "listing": 2}
Used = list[tuple[str, int, frozenset[str], frozenset[str]]]  # split, number of the image, positive and unknown labels


def own_input(draw: st.DrawFn, base: Path, folder: Path) -> Case:
    """A table or folder with up to three oddities."""
    drawn = draw(st.tuples(*[st.integers(0, 2**16 - 1)] * 4))  # one integer would often be 0
    seed = int.from_bytes(hashlib.sha256(repr(drawn).encode()).digest()[:5])
    draft = make(seed)
    folder.mkdir(exist_ok=True)
    keys = write(draft, folder)
    names = ", ".join(oddity.name for oddity in draft.oddities)

    def act() -> None:
        try:
            check(draft, keys, folder)
        except Silent as error:
            kinds = re.sub(r"\d+", "N", f"{draft.kind}, {names or 'plain'}")
            raise Silent(f"{kinds}: {error}") from error

    return f"seed {seed}: {draft.kind}, {draft.setting}: {names}"[:300], act


def make(seed: int) -> Draft:
    """Return the draft of a seed."""
    random = Random(seed)
    draft = plain(random, random.choices(KINDS, [SHARES[kind] for kind in KINDS])[0])
    changes = CHANGES[draft.kind].copy()
    random.shuffle(changes)
    wanted = len(draft.oddities) + random.choices((0, 1, 2, 3), (1, 7, 2, 1))[0]
    for change in changes:
        if len(draft.oddities) >= wanted:
            break
        if (oddity := change(draft)) is not None:
            draft.oddities.append(oddity)
    return draft


def check(draft: Draft, keys: dict[str, object], folder: Path) -> None:
    """Open the input in each way; raise Silent if something is neither used nor said."""
    if draft.kind == "listing":
        _check_listing(draft, folder)
        return
    config = _config()
    with config.unlocked():
        config.data.update(keys)
        if draft.setting != "plain":
            config.train.fit, config.eval.select_on, config.thresholds.at_end = "steps", "val", False
    from mlmoe_jax.apps.tools.check import check_data
    from mlmoe_jax.training.training_data import open_training_data

    data, said, error = _heard(lambda: open_training_data(config), folder)
    report, said_by_check, check_error = _heard(lambda: check_data(config), folder)
    if report is not None:
        said_by_check += [_plain_text(sentence, folder) for sentence in (*report["problems"], *report["warnings"])]
    if data is None:
        _require_reason(draft, error)
        if check_error is None and not any(_said(oddity, said_by_check) for oddity in _refusable(draft)):
            raise Silent(f"a training is refused, but not by mlmoe data: {error}")
        return
    splits = {split.name: split for split in (data.train_split, *data.eval_splits.values())}
    used = [item for split in splits.values() for item in _content(split)]
    compare(draft, used, data.train_split.classes, said, "training")
    if check_error is not None:
        _require_reason(draft, check_error)
        return
    compare(draft, used, report["classes"], said_by_check, "mlmoe data")


@functools.cache
def _shipped():
    import mlmoe_jax.config as configuration

    path = Path(__file__).parents[2] / "configs/own_csv.py"
    return configuration.load_config(f"{path}:root=photos,backbone=efficientnet_lite0", [])


def _config():
    return _shipped().copy_and_resolve_references()


def _heard(act: Callable[[], object], folder: Path) -> tuple[object, list[str], str | None]:
    """Return the value of `act`, the lines that it says, and the text of its UserError, without the folder's path."""
    stream, records = io.StringIO(), []
    handler, logger = logging.Handler(), logging.getLogger("mlmoe_jax")
    handler.emit = lambda record: records.append(record.getMessage())
    logger.addHandler(handler)
    value = error = None
    try:
        with contextlib.redirect_stderr(stream), contextlib.redirect_stdout(stream), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = act()
    except UserError as raised:
        error = _plain_text(str(raised), folder)
        if "\n" in error:
            raise Silent(f"an error of several lines: {error}") from raised
    finally:
        logger.removeHandler(handler)
    lines = [*stream.getvalue().splitlines(), *records]
    return value, [_plain_text(line, folder) for line in lines], error


def _plain_text(text: str, folder: Path) -> str:
    return nfc(text.replace(str(folder), "ROOT"))


def _content(split) -> Used:
    """Return the images of a split with their labels, each recognized by its color. Unreadable images are left out."""
    content = []
    for row in range(len(split)):
        try:
            number = number_of(np.asarray(split.images.read(row)))
        except BadImage:
            continue
        names = np.array(split.classes, object)
        codes = split.labels[row]
        content.append((split.name, number, frozenset(names[codes == 1]), frozenset(names[codes == -1])))
    return content


# ------------------------------------------------------------------------------------------------------------ the rules
def _refusable(draft: Draft) -> list[Oddity]:
    return [oddity for oddity in draft.oddities if oddity.words]


def _said(oddity: Oddity, lines: Iterable[str], counts: Collection[int] = ()) -> bool:
    """Return whether lines are about an oddity.

    If there are `counts`, one of them has to be a number in a line, or the sum of a number of each line.
    """
    found = [line for line in lines if re.search(oddity.words, line, re.IGNORECASE)]
    if not counts:
        return bool(found)
    numbers = [
        {int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", line)} for line in dict.fromkeys(found)
    ]
    sums = {sum(chosen) for chosen in itertools.product(*filter(None, numbers[:4]))}
    return not set(counts).isdisjoint(sums.union(*numbers))


def _require_reason(draft: Draft, error: str) -> None:
    """Raise Silent unless an error is about an oddity, or about a split that has too few images."""
    if "no image with a positive label" in error or "images leaves" in error:
        return
    if not any(_said(oddity, [error]) for oddity in _refusable(draft)):
        raise Silent(f"refused for another reason: {error}")


def compare(draft: Draft, used: Used, classes: Iterable[str], said: list[str], way: str) -> None:
    """Raise Silent unless everything that is given is used with its meaning, or said."""
    reported = [o for o in _refusable(draft) if _said(o, said) or (o.by_check and way == "training")]
    problems = [*_wrong_images(draft, used, reported), *_lost(draft, used, said)]
    known = {*LABELS, *(name for meaning in draft.meanings.values() for pair in meaning.labels for name in pair[0])}
    excused = {name for oddity in reported for name in oddity.classes}
    problems += [f"the class {name!r}" for name in classes if name not in known | excused]
    if problems:
        raise Silent(f"{way}: {'; '.join(problems)}"[:300])


def _wrong_images(draft: Draft, used: Used, reported: Collection[Oddity]) -> list[str]:
    """Return sentences about images in splits that nobody gave, or gave with another meaning."""
    problems = []
    seen = [number for _, number, _, _ in used]
    for split, number, positive, unknown in used:
        if any(number in oddity.images for oddity in reported):
            continue
        if number not in draft.meanings:
            problems.append(f"image {number} is in {split}, but was not given")
            continue
        meaning = draft.meanings[number]
        splits = meaning.splits | ({"val"} if draft.setting == "held out" and "train" in meaning.splits else set())
        if split not in splits:
            problems.append(f"image {number} of {sorted(splits)} is in {split}")
        if not any(positive == right and unknown <= maybe for right, maybe in meaning.labels):
            problems.append(f"image {number} has the labels {sorted(positive)}, unknown {sorted(unknown)}")
        if seen.count(number) > 1:
            problems.append(f"image {number} is used {seen.count(number)} times")
    return problems


def _lost(draft: Draft, used: Used, said: list[str]) -> list[str]:
    """Return sentences about input that is left out and not counted. One sentence may count several oddities."""
    lost = set(draft.meanings) - {number for _, number, _, _ in used}
    files = sum(oddity.files for oddity in draft.oddities)
    covered: set[int] = set()
    problems = []
    for oddity in _refusable(draft):
        others = {number for other in _refusable(draft) if other is not oddity for number in other.images}
        mine = lost & oddity.images
        least = len(mine - others) + oddity.files
        rows = sum(1 for entry in draft.entries if entry.number in mine)
        counts = {*range(max(1, least), len(lost) + files + 1), *oddity.counts, len(oddity.images), rows}
        if (mine or oddity.files) and _said(oddity, said, counts):
            covered |= mine
        elif oddity.files and oddity.must_say:
            problems.append(f"{oddity.name}: {oddity.files} left out, which is not said")
    problems += [f"image {number} is lost, which is not said" for number in sorted(lost - covered)]
    return problems


# ---------------------------------------------------------------------------------------------------- images to predict
def _check_listing(draft: Draft, folder: Path) -> None:
    from mlmoe_jax.apps.tools.image_list import find_images

    paths, said, error = _heard(lambda: list(ImageNames(find_images([str(folder)]).images)), folder)
    if paths is None:
        _require_reason(draft, error)
        return
    used: Used = []
    for path in paths:
        with contextlib.suppress(OSError):
            number = number_of(np.asarray(Image.open(path).convert("RGB")))
            used.append(("train", number, frozenset(), frozenset()))
    for meaning in draft.meanings.values():
        meaning.labels = [(frozenset(), frozenset())]
    compare(draft, used, (), said, "--images")
