"""Check a data set (`--mode=data`): report its contents, and problems that would invalidate training or metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
from ml_collections import ConfigDict
from scipy.sparse import csr_array

from mlmoe_jax.apps.tools.duplicates import Duplicates, InspectedImages, duplicates, inspect
from mlmoe_jax.data.images import BadImage, Decoding
from mlmoe_jax.data.labels.grouping import cooccurrence
from mlmoe_jax.data.sources.open import open_splits, root_of
from mlmoe_jax.data.split import DIFFICULT, POSITIVE, UNKNOWN, Split
from mlmoe_jax.data.split_checks import EXAMPLES, check_splits, count_labels, label_warnings
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.formats import to_json
from mlmoe_jax.runtime.progress import Progress
from mlmoe_jax.runtime.text import text_table

TOP = 10  # listed co-occurrences, and pairs of labels that never occur together
SHOWN_CLASSES = 60  # in the text; JSON contains all
MOST_LABELS = 8  # rows of images by number of labels in the text; the last counts all larger numbers
SAME = {"id": "same id", "content": "same file content", "look": "similar appearance"}


# -------------------------------------------------------------------------------------------------------------- report
def print_checkup(config: ConfigDict, as_json: bool, sample: int = 0) -> int:
    """Check the data set of `config.data` and print the report; return 1 if there are problems, else 0."""
    report = check_up(config, sample)
    print(to_json(report, indent=2) if as_json else format_checkup(report))
    return 1 if report["problems"] else 0


def check_up(config: ConfigDict, sample: int = 0) -> dict[str, Any]:
    """Open every split that `config.data` names, decode its images, and return the report as a JSON-serializable dict.

    sample: decode at most this many images per split, evenly spaced; 0 = all.
    `problems` lists errors that have to be corrected, `warnings` notes about the data. Raises UserError if the training
    split cannot be opened or has no images, and for a negative `sample`.
    """
    if sample < 0:
        raise UserError(f"--sample={sample} should be a number of images per split, or 0 for all")
    splits, problems = _open_splits(config)
    rows, decoding = [_spread(len(split), sample) for split in splits], Decoding.of(config.data)
    progress = Progress("check", sum(map(len, rows)), 1)
    try:
        inspected = [
            inspect(split, chosen, progress.advance, decoding) for split, chosen in zip(splits, rows, strict=True)
        ]
    finally:
        progress.close()
    if config.data.name == "packed":
        problems += _damaged_files(config.data.root)
    twice = duplicates(splits, inspected)
    checked = list(zip(splits, inspected, strict=True))
    return {
        "name": config.data.name,
        "root": root_of(config.data),
        "classes": list(splits[0].classes),
        "splits": {split.name: _of_split(split, found) for split, found in checked},
        "cooccurrence": _together(splits[0]),
        "duplicates": [_entry(item) for item in twice],
        "problems": [
            *problems,
            *(sentence for split, found in checked for sentence in _bad_images(split, found)),
            *(_sentence(item) for item in twice if _is_leak(item)),
        ],
        "warnings": [*label_warnings(splits[0]), *(_sentence(item) for item in twice if not _is_leak(item))],
    }


def _open_splits(config: ConfigDict) -> tuple[list[Split], list[str]]:
    """Return the splits that are usable, the training split first, and one sentence per split that is not."""
    data_config = config.data.copy_and_resolve_references()
    data_config.bad_images = "skip"  # missing images are counted here instead of raising when a split is opened
    names, errors = (data_config.val_split, *data_config.test_splits), []
    train, *others = open_splits(
        data_config, names, seed=config.seed, keep_missing=True, refused=errors.append
    ).values()
    check_splits(train, [])
    usable = [train]
    for split in others:
        try:
            check_splits(split, [])
            usable.append(split)
        except UserError as error:
            errors.append(error)
    return usable, list(map(str, errors))


def _spread(images: int, sample: int) -> np.ndarray:
    return np.linspace(0, images - 1, min(images, sample or images)).astype(np.int64)


def _of_split(split: Split, found: InspectedImages) -> dict[str, Any]:
    labels_per_image = (split.labels == POSITIVE).sum(axis=1)
    bad = [{"id": split.ids[row], "missing": _is_missing(error), "why": str(error)} for row, error in found.bad.items()]
    return {
        "images": len(split),
        "decoded": len(found.rows) + len(bad),
        "missing": sum(item["missing"] for item in bad),
        "unreadable": sum(not item["missing"] for item in bad),
        "bad": bad,
        "width": _range(found.width),
        "height": _range(found.height),
        "mean_labels": float(labels_per_image.mean()),
        "images_by_labels": np.bincount(labels_per_image).tolist(),
        "positive": count_labels(split, POSITIVE),
        "difficult": count_labels(split, DIFFICULT),
        "unknown": count_labels(split, UNKNOWN),
    }


def _range(sizes: np.ndarray) -> list[int] | None:
    return [int(sizes.min()), int(np.median(sizes)), int(sizes.max())] if len(sizes) else None


def _is_missing(error: BadImage) -> bool:
    return isinstance(error.__cause__, FileNotFoundError)


def _together(train: Split) -> dict[str, Any]:
    """Return the largest p(b|a), and the pairs that never occur together, by decreasing number expected by chance."""
    counts, positives = cooccurrence(train.labels)
    met = counts.tocoo()
    # Two images of `a`, both with `b`, are little evidence of p = 1: rank as if there were five more without `b`.
    rank = met.data / (positives[met.row] + 5)
    strongest = [(int(met.row[at]), int(met.col[at])) for at in np.argsort(-rank, kind="stable")[:TOP]]
    never, examples = _never_together(counts, positives)
    present, name = int(np.count_nonzero(positives)), train.classes
    return {
        "split": train.name,
        "strongest": [
            {
                "a": name[a],
                "b": name[b],
                "p": float(counts[a, b] / positives[a]),
                "images": int(counts[a, b]),
                "of": int(positives[a]),
            }
            for a, b in strongest
        ],
        "pairs": present * (present - 1) // 2,
        "never": never,
        "never_examples": [
            {"a": name[a], "b": name[b], "by_chance": float(product / len(train))} for product, a, b in examples
        ],
    }


def _never_together(counts: csr_array, positives: np.ndarray) -> tuple[int, list[tuple[int, int, int]]]:
    """Return the number of pairs of used labels that never occur together, and (product, a, b) of the TOP largest.

    product: of their numbers of positives. All pairs of 20,000 labels would take gigabytes, so labels are processed one
    by one.
    """
    never, best = 0, []
    for a in np.flatnonzero(positives):
        products = positives[a] * positives[a + 1 :]
        later = counts.indices[counts.indptr[a] : counts.indptr[a + 1]] - (a + 1)
        products[later[later >= 0]] = 0
        never += int(np.count_nonzero(products))
        candidates = np.flatnonzero(products > (best[-1][0] if len(best) == TOP else 0))
        of_row = candidates[np.argsort(-products[candidates], kind="stable")[:TOP]]
        best += [(int(products[b]), int(a), int(a + 1 + b)) for b in of_row]
        best = sorted(best, key=lambda pair: -pair[0])[:TOP]
    return never, best


def _entry(item: Duplicates) -> dict[str, Any]:
    return {
        "kind": item.kind,
        "splits": [item.first.name, item.second.name],
        "images": item.images,
        "other_labels": item.other_labels,
        "examples": [[item.first.ids[i], item.second.ids[j]] for i, j in item.pairs[:EXAMPLES]],
    }


# ----------------------------------------------------------------------------------------------- problems as sentences
def _damaged_files(root: str) -> list[str]:
    """Compare the files of a packed data set with their checksums; return one sentence per damaged file."""
    from mlmoe_jax.data.sources import packed

    splits = packed.read_manifest(root)[1]["splits"].values()
    files = sum(1 + len(split["shards"]) for split in splits)
    progress = Progress("verify", files, sum(split["images"] for split in splits) // files)
    wrong = []
    for sentence in packed.verify(root):
        wrong += [sentence] if sentence else []
        progress.advance()
    progress.close()
    return wrong


def _bad_images(split: Split, found: InspectedImages) -> list[str]:
    missing = [row for row, error in found.bad.items() if _is_missing(error)]
    unreadable = [row for row, error in found.bad.items() if not _is_missing(error)]
    sentences = []
    for rows, what in ((missing, "found"), (unreadable, "read")):
        if rows:
            listed = "; ".join(str(found.bad[row]) for row in rows[:EXAMPLES]) + ("; …" if len(rows) > EXAMPLES else "")
            many = f"{len(rows):,} of the {len(split):,} images of split {split.name}"
            sentences.append(f"{many} cannot be {what}: {listed}")
    return sentences


def _is_leak(item: Duplicates) -> bool:
    """Return whether a model would be evaluated on images it was trained on; similar images are only a warning."""
    return item.first is not item.second and item.kind != "look"


def _sentence(item: Duplicates) -> str:
    i, j = item.pairs[0]
    those = f"{item.images:,} of its {len(item.second):,} images"
    what = f"has {those} twice" if item.first is item.second else f"shares {those} with split {item.first.name}"
    relabeled = f", {item.other_labels:,} of them with other labels" if item.other_labels else ""
    return (
        f"split {item.second.name} {what} ({SAME[item.kind]}{relabeled}), such as {item.second.ids[j]} as "
        f"{item.first.ids[i]}"
    )


# ---------------------------------------------------------------------------------------------------------------- text
def format_checkup(report: dict[str, Any]) -> str:
    """Return the report as text."""
    where = f" in {report['root']}" if report["root"] else ""
    parts = [
        f"data set {report['name']}{where}: {len(report['classes']):,} classes",
        _split_table(report["splits"]),
        _class_table(report["classes"], report["splits"]),
        _pairs(report["cooccurrence"]),
        "\n".join(
            [f"problem: {sentence}" for sentence in report["problems"]]
            + [f"warning: {sentence}" for sentence in report["warnings"]]
        )
        or "no problems found",
    ]
    return "\n\n".join(parts)


def _split_table(splits: dict[str, dict[str, Any]]) -> str:
    rows = [["images", *(f"{split['images']:,}" for split in splits.values())]]
    if any(split["decoded"] < split["images"] for split in splits.values()):
        rows.append(["  decoded", *(f"{split['decoded']:,}" for split in splits.values())])
    for key in ("missing", "unreadable"):
        rows.append([f"  {key}", *(f"{split[key]:,}" for split in splits.values())])
    for key in ("width", "height"):
        ranges = [split[key] for split in splits.values()]
        rows.append([f"{key} in pixels: min, median, max", *(" ".join(map(str, r)) if r else "-" for r in ranges)])
    rows.append(["labels per image, mean", *(f"{split['mean_labels']:.2f}" for split in splits.values())])
    longest = max(len(split["images_by_labels"]) for split in splits.values())
    for labels in range(min(longest, MOST_LABELS)):
        more = labels == MOST_LABELS - 1 and longest > MOST_LABELS
        these = slice(labels, None if more else labels + 1)
        cells = [_share(sum(split["images_by_labels"][these]), split["images"]) for split in splits.values()]
        rows.append([f"  images with {labels}{' or more' if more else ''}", *cells])
    return text_table([["", *splits], *rows])


def _share(count: int, whole: int) -> str:
    return f"{count:,} ({100 * count / whole:.0f} %)"


def _class_table(classes: list[str], splits: dict[str, dict[str, Any]]) -> str:
    """Return one line per class, by decreasing frequency in the first split."""
    columns, header = [], ["class"]
    for name, split in splits.items():
        columns.append([f"{count:,}" for count in split["positive"]])
        columns.append([f"{100 * count / split['images']:.1f} %" for count in split["positive"]])
        header += [name, ""]
        for key in ("difficult", "unknown"):
            if any(split[key]):
                columns.append([f"{count:,}" for count in split[key]])
                header.append(key)
    order = np.argsort(-np.array(next(iter(splits.values()))["positive"]), kind="stable").tolist()
    shown = order if len(order) <= SHOWN_CLASSES else order[: SHOWN_CLASSES // 2] + order[-SHOWN_CLASSES // 2 :]
    rows = [[classes[k], *(column[k] for column in columns)] for k in shown]
    if len(shown) < len(order):
        rows.insert(SHOWN_CLASSES // 2, [f"… {len(order) - len(shown):,} more (all with --json)", *[""] * len(columns)])
    return text_table([header, *rows])


def _pairs(together: dict[str, Any]) -> str:
    rows = [
        [f"  p({pair['b']} | {pair['a']})", f"{pair['p']:.2f}", f"{pair['images']:,} of {pair['of']:,}"]
        for pair in together["strongest"]
    ]
    never = [[f"  {pair['a']}, {pair['b']}", f"{pair['by_chance']:.1f}"] for pair in together["never_examples"]]
    return "\n".join(
        [
            f"labels that occur together most often, in split {together['split']}",
            text_table(rows),
            "",
            f"{together['never']:,} of {together['pairs']:,} pairs of labels never occur together there; the number of "
            "images expected by chance",
            text_table(never),
        ]
    )
