"""What of the input is used: the rows of a table, the files of a folder, and the images and cells that are left out.

Every reader counts what it was given, and for each piece either the split that uses it or the reason why none does.
The account of a file is the same whichever of its splits is opened, so that the accounts of several splits of a data
set can be joined without counting anything twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mlmoe_jax.runtime.text import quantity

SHOWN_EXAMPLES = 3  # examples of each reason


@dataclass
class LeftOut:
    """The input that is left out for one reason.

    Attributes:
      count: the number of rows, files, images or cells.
      examples: the first SHOWN_EXAMPLES of them: names, or positions such as "line 7".
    """

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, example: str, count: int = 1) -> None:
        """Count `count` pieces of input, of which `example` is one. An empty example is not kept."""
        self.count += count
        if example and len(self.examples) < SHOWN_EXAMPLES:
            self.examples.append(example)


@dataclass
class Usage:
    """The account of one file or folder.

    Attributes:
      place: the file or folder.
      unit: the noun for a piece of input: "row", "file", "image" or "cell".
      used: name of a split -> the number of pieces that it uses. Input without splits has the split "".
      left_out: reason -> the input that no split uses for this reason. A reason follows "not used: 5 " and the unit in
        a sentence, such as "of the split 'valid'" or "without labels".
    """

    place: str
    unit: str
    used: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, LeftOut] = field(default_factory=dict)

    def use(self, split: str = "", count: int = 1) -> None:
        """Count input that a split uses."""
        self.used[split] = self.used.get(split, 0) + count

    def leave_out(self, reason: str, example: str = "", count: int = 1) -> None:
        """Count input that no split uses. `example` is the name or the position of a piece."""
        self.left_out.setdefault(reason, LeftOut()).add(example, count)

    @property
    def given(self) -> int:
        """The number of all pieces."""
        return sum(self.used.values()) + self.unused

    @property
    def unused(self) -> int:
        """The number of pieces that are left out."""
        return sum(part.count for part in self.left_out.values())

    def sentence(self) -> str:
        """Return one sentence about the input that is left out; "" if all input is used."""
        if not self.left_out:
            return ""
        parts = []
        for reason, part in self.left_out.items():
            more = ", …" if part.count > len(part.examples) else ""
            examples = f" ({', '.join(part.examples)}{more})" if part.examples else ""
            parts.append(f"{part.count:,} {reason}{examples}")
        verb = "is" if self.unused == 1 else "are"
        return f"{self.place}: {self.unused:,} of {quantity(self.given, self.unit)} {verb} not used: {'; '.join(parts)}"


def unused_input(usages: Iterable[Usage]) -> list[str]:
    """Return one sentence per file or folder of which something is left out. Equal accounts are reported once."""
    return list(dict.fromkeys(sentence for usage in usages if (sentence := usage.sentence())))
