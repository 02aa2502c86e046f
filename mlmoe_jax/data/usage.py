"""What of the input is used: the rows of a table, the files of a folder, and the images and cells that are left out.

Every reader counts what it was given, and for each piece either the split that uses it or the reason why none does.
The account of a file is the same whichever of its splits is opened, except for images that are left out of the opened
split only. The accounts of all splits of a data set are joined without counting anything twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from mlmoe_jax.runtime.text import quantity

SHOWN_EXAMPLES = 3  # examples of each reason


@dataclass
class LeftOut:
    """The input that is left out for one reason: its count, and the first SHOWN_EXAMPLES names or positions."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, example: str, count: int = 1) -> None:
        """Count `count` pieces of input. `example` is the name or the position of one piece; "" gives none."""
        self.count += count
        if example and len(self.examples) < SHOWN_EXAMPLES:
            self.examples.append(example)

    def __str__(self) -> str:
        more = ", …" if self.count > len(self.examples) else ""
        return f" ({', '.join(self.examples)}{more})" if self.examples else ""


@dataclass
class Usage:
    """The account of one file or folder.

    Attributes:
      unit: the noun for a piece of input: "row", "file", "image" or "cell".
      used: name of a split -> the number of pieces that it uses. Input without splits has the split "".
      left_out: reason -> the input that no split uses for this reason. A reason follows "not used: 5 " and the unit in
        a sentence, such as "of the split 'valid'" or "without labels".
      merged: name of a split -> the number of further pieces about images that are counted in `used`.
      notes: sentences about input that is used in another way than its author may expect. Each follows the place, such
        as "has 2 labels in two spellings".
    """

    place: str
    unit: str
    used: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, LeftOut] = field(default_factory=dict)
    merged: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def use(self, split: str = "", count: int = 1) -> None:
        self.used[split] = self.used.get(split, 0) + count

    def leave_out(self, reason: str, example: str = "", count: int = 1) -> None:
        """Count input that no split uses. `example` is the name or the position of a piece."""
        self.left_out.setdefault(reason, LeftOut()).add(example, count)

    def merge(self, split: str, count: int) -> None:
        """Move `count` pieces of input from `used` to `merged`, because their images are already counted."""
        self.use(split, -count)
        self.merged[split] = self.merged.get(split, 0) + count

    @property
    def given(self) -> int:
        return sum(self.used.values()) + sum(self.merged.values()) + self.unused

    @property
    def unused(self) -> int:
        return sum(part.count for part in self.left_out.values())

    def drop(self, split: str, reason: str, images: Iterable[str]) -> Usage:
        """Return an account in which `images` of a split are counted as left out for `reason`, no longer as used."""
        account = replace(self, used=dict(self.used), left_out=dict(self.left_out))
        for image in images:
            account.use(split, -1)
            account.leave_out(f"{reason} (split {split})", image)
        return account

    def hold_out(self, split: str, held_out: str, count: int) -> Usage:
        """Return an account in which `count` images of `split` are in `held_out`; this account if it has no `split`."""
        if split not in self.used:
            return self
        return replace(self, used={**self.used, split: self.used[split] - count, held_out: count})

    def join(self, other: Usage) -> Usage:
        """Return the account of this and another split of the same file or folder."""
        splits = {**self.used, **other.used}
        used = {split: min(own.get(split, count) for own in (self.used, other.used)) for split, count in splits.items()}
        notes = list(dict.fromkeys((*self.notes, *other.notes)))
        left_out = {**self.left_out, **other.left_out}
        return replace(self, used=used, left_out=left_out, merged={**self.merged, **other.merged}, notes=notes)

    def sentences(self) -> list[str]:
        """Return sentences about the input that is left out, or used in another way than its author may expect."""
        sentences = [f"{self.place} {note}" for note in self.notes]
        if self.left_out:
            parts = "; ".join(f"{part.count:,} {reason}{part}" for reason, part in self.left_out.items())
            verb = "is" if self.unused == 1 else "are"
            given = quantity(self.given, self.unit)
            sentences.insert(0, f"{self.place}: {self.unused:,} of {given} {verb} not used: {parts}")
        return sentences

    def document(self) -> dict[str, Any]:
        """Return the account as a JSON-serializable dict."""
        left_out = {reason: part.count for reason, part in self.left_out.items()}
        account = {"place": self.place, "unit": self.unit, "given": self.given, "used": self.used}
        return {**account, "merged": sum(self.merged.values()), "left_out": left_out, "notes": self.notes}


def join_usages(usages: Iterable[Usage]) -> list[Usage]:
    """Return one account per file or folder from the accounts of several splits."""
    joined: dict[tuple[str, str], Usage] = {}
    for usage in usages:
        key = (usage.place, usage.unit)
        joined[key] = joined[key].join(usage) if key in joined else usage
    return list(joined.values())


def unused_input(usages: Iterable[Usage]) -> list[str]:
    """Return the `Usage.sentences` of each file or folder. The accounts of its splits are joined first."""
    return [sentence for usage in join_usages(usages) for sentence in usage.sentences()]
