"""Words that make a reader read twice: `python -m tools.docs.words [FOLDER ...]` lists where they are."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PLACES = ("README.md", "docs", "mlmoe_jax", "configs", "launch", "benchmarks", "tools")
TEXTS = frozenset({".py", ".md", ".sh", ".html", ".js", ".toml", ".json"})

# A pronoun for a noun that stands elsewhere. "the same" counts where no noun follows it.
BACK_REFERENCE = (
    r"\b(?:(?:those|that|these|the ones?) of|the others(?! than)|the latter|the former"
    r"|the same(?=[.,;:)]|$| (?:as|for|of|in|with|on|by|to|if|from|at)\b))\b"
)
# The standard word for a private one.
PRIVATE = {
    r"cuts?(?! (?:off|short|at|into|in|to|the)\b)": "threshold",
    r"(?<!tables and )(?<!tables or )figures": "metric, number or plot",
    r"signs? of life": "heartbeat",
    r"compan(?:y|ies)": "co-occurrence",
    r"settle[sd]?": "resolve",
    r"mend(?:ed|s|ing)?": "fix",
    r"str(?:ikes?|uck)": "hit",
    r"honest(?:ly)?": "held out",
    r"rooms?": "package, disk space or capacity",
    r"told": "reported",
    r"looks?(?! (?:at|for|up|like|the|it|into)\b)": "perceptual hash",
}
BRITISH = (
    r"\b(?!labell(?:imit|edby))\w*(?:colour|behaviour|favour|neighbour|centre|licence|labell|modell|normalis|initialis|optimis"
    r"|organis|regularis|generalis|summaris|recognis|serialis|quantis|vectoris|visualis)\w*"
)


def in_text(pattern: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and match of each place of a pattern in prose: without code in backticks."""
    plain = re.sub(r"`[^`\n]*`", "``", text)
    for match in re.finditer(pattern, plain, re.IGNORECASE | re.MULTILINE):
        yield plain.count("\n", 0, match.start()) + 1, match[0]


def files(places: tuple[str, ...] = PLACES) -> Iterator[Path]:
    """Yield the files with prose under the places."""
    for place in places:
        path = REPOSITORY / place
        paths = [path] if path.is_file() else sorted(path.rglob("*"))
        inside = (file for file in paths if not {"__pycache__", "tests"} & {*file.relative_to(REPOSITORY).parts})
        inside = (file for file in inside if file != Path(__file__))
        yield from (file for file in inside if file.suffix in TEXTS)


def count(places: tuple[str, ...] = PLACES) -> dict[str, list[str]]:
    """Return the places, "FILE:LINE WORD", of each kind of word."""
    private = r"\b(?:" + "|".join(PRIVATE) + r")\b"
    kinds = {"back references": BACK_REFERENCE, "private words": private, "British spelling": BRITISH}
    lists = {kind: [] for kind in kinds}
    for path in files(places):
        text, name = path.read_text("utf8"), path.relative_to(REPOSITORY)
        for kind, pattern in kinds.items():
            lists[kind] += [f"{name}:{number} {word}" for number, word in in_text(pattern, text)]
    return lists


if __name__ == "__main__":
    listed = count(tuple(sys.argv[1:]) or PLACES)
    for kind, lines in listed.items():
        print(f"{len(lines):5d} {kind}", *lines, sep="\n      ")
    print({kind: len(lines) for kind, lines in listed.items()})
