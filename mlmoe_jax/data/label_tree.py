"""Trees of labels: labels that imply others, and labels of which at most or exactly one is present.

The YAML file `data.tree` maps a label to the labels that it implies, and lists groups of exclusive labels:

    implies:
      poodle: dog
      dog: [animal, pet]
    exclusive:
      - [day, night]

Each label stands once under `implies`. It may imply several others, so a "tree" is any graph without cycles. Sets of
labels of which exactly one is present are attributes, see `data.attributes`. Shape letters: N images, K labels.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from mlmoe_jax.data.label_codes import DIFFICULT, NEGATIVE, POSITIVE, UNKNOWN
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.array_types import Bools, Ints
from mlmoe_jax.runtime.files import MIB, PathLike, damage_explained, read_text
from mlmoe_jax.runtime.text import compose

Codes = NDArray[np.int8]
MOST_TREE = 4 * MIB  # size of a file, about 100,000 labels, which are read in seconds
MOST_LABELS = 1_000_000  # in the lists of a file, counted as often as they occur
_MOST_STEPS = 2_000_000  # from labels to labels that imply them
_SHOWN = 8  # labels of a cycle in a message
_FORM = "write such as `implies: {poodle: [dog, pet]}` and `exclusive: [[day, night]]`"


@dataclass(frozen=True)
class Attribute:
    """A set of labels, its values, of which exactly one is present in an image.

    Attributes:
      labels: the indices of the values; −1 for a value that is left out of the output.
      optional: whether the last value means that no other value is present. It is then present in an image whose other
        values are all negative. Without it, the values of such an image are unknown.
    """

    name: str
    labels: tuple[int, ...]
    optional: bool = False

    @property
    def present(self) -> Ints:
        """The indices of the values in the output, i64[V]."""
        labels = np.array(self.labels)
        return labels[labels >= 0]

    def value(self, label: str) -> str:
        """Return the value of a label, such as red for `color: red`."""
        return label.removeprefix(f"{self.name}: ")

    def close(self, codes: Codes) -> tuple[Codes, Bools]:
        """Return codes i8[N,V] of the values with one present value, or all unknown; and which images have several."""
        given = (codes == POSITIVE) | (codes == DIFFICULT)
        count = given.sum(axis=1)
        closed = np.where(given, codes, NEGATIVE)
        closed[count == 0] = UNKNOWN
        if self.optional:
            closed[(codes == NEGATIVE).all(axis=1)] = [NEGATIVE] * (len(self.labels) - 1) + [POSITIVE]
        return closed, count > 1


@dataclass(frozen=True)
class LabelTree:
    """A description of which labels imply or exclude other labels. Labels are given by their indices.

    Without arguments, no label implies or excludes another label. A tree is true if it has more than `attributes`.

    Attributes:
      implies: pairs (label, implied label).
      exclusive: groups of labels of which at most one is present in an image.
      attributes: groups of labels of which exactly one is present in an image.
    """

    implies: tuple[tuple[int, int], ...] = ()
    exclusive: tuple[tuple[int, ...], ...] = ()
    attributes: tuple[Attribute, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.implies or self.exclusive)

    def consistent(self, is_used: bool) -> LabelTree:
        """Return the tree with which scores agree: all of it if `is_used` (`eval.consistent`), else its attributes."""
        return self if is_used else replace(INDEPENDENT, attributes=self.attributes)

    def values(self, names: Sequence[str]) -> dict[str, tuple[str, str]]:
        """Return label -> (attribute, value), for each label in `names` that is a value."""
        return {names[k]: (item.name, item.value(names[k])) for item in self.attributes for k in item.present}

    def without_attributes(self) -> LabelTree:
        return replace(self, attributes=())

    @cached_property
    def parents(self) -> dict[int, list[int]]:
        """A map from each label in `implies` to its parents, the labels that it directly implies.

        The map has the parents of a label before the label.
        """
        parents: dict[int, list[int]] = {}
        for label, parent in dict.fromkeys(self.implies):
            parents.setdefault(label, []).append(parent)
        return {label: parents.get(label, []) for label in TopologicalSorter(parents).static_order()}

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """A map from each label in `implies` to its children, the labels that directly imply it.

        The map has the children of a label before the label.
        """
        children: dict[int, list[int]] = {label: [] for label in reversed(self.parents)}
        for label, parents in self.parents.items():
            for parent in parents:
                children[parent].append(label)
        return children

    def find_contradiction(self, names: Sequence[str]) -> str:
        """Return a description of the first contradiction in the tree; "" if there is none.

        A contradiction is a cycle, a label that implies two exclusive labels, an exclusive group that does not have two
        or more different labels, or a value of two attributes. The values of an attribute are exclusive.
        """
        if cycle := self._find_cycle():
            shown = [names[k] for k in cycle[:_SHOWN]] + ["…"] * (len(cycle) > _SHOWN)
            return f"{' implies '.join(shown)}, which is a cycle"
        values = [label for attribute in self.attributes for label in attribute.labels]
        if len(set(values)) < len(values):
            return "a label is a value of two attributes"
        steps = 0
        for group in (*self.exclusive, *(attribute.labels for attribute in self.attributes)):
            count, problem = self._check_group(group, names)
            if problem:
                return problem
            steps += count
            if steps > _MOST_STEPS:
                return f"its exclusive labels are implied more than {_MOST_STEPS:,} times, too often to check"
        return ""

    def _find_cycle(self) -> list[int]:
        """Return labels of which each implies the next, and which end where they begin; [] if there are none."""
        try:
            _ = self.children  # in topological order, so a cycle is found
        except CycleError as error:
            return error.args[1][::-1]
        return []

    def _check_group(self, group: Sequence[int], names: Sequence[str]) -> tuple[int, str]:
        """Return the number of labels that are or imply members of an exclusive group, and a contradiction or ""."""
        if len(set(group)) < max(2, len(group)):
            return 0, f"the exclusive labels {', '.join(names[k] for k in group)} are not two or more different labels"
        if not any(map(self.children.get, group)):
            return 0, ""
        implied: dict[int, int] = {}  # label -> the member that it is or implies
        waiting = [(member, member) for member in reversed(group)]
        while waiting:
            label, member = waiting.pop()
            other = implied.get(label)
            if other is None:
                implied[label] = member
                waiting += [(child, member) for child in self.children.get(label, ())]
            elif other != member:
                both = " and ".join(names[k] for k in (other, member) if k != label)
                exclusive = f"{names[other]} and {names[member]} are exclusive"
                return len(implied), f"{exclusive}, but {names[label]} implies {both}"
        return len(implied), ""

    def close(self, codes: Codes) -> tuple[Codes, Bools]:
        """Return consistent label codes i8[N,K], and bool[N,3], whether an image has a contradiction of each kind.

        A label is present if its code is POSITIVE or DIFFICULT. A present label makes the labels that it implies
        present, and the labels that it excludes negative. A negative label makes the labels that imply it negative.
        There are three kinds of contradictions. If a present label implies a negative label, the negative label becomes
        present. If two exclusive labels are present, both become unknown, and the present labels that imply them become
        unknown too. The third is an image with two values of an attribute.
        """
        closed, rule_breaks = self._close_rules(codes)
        several = np.zeros(len(codes), bool)
        for attribute in self.attributes:
            closed[:, attribute.labels], found = attribute.close(closed[:, attribute.labels])
            several |= found
        return closed, np.column_stack([rule_breaks, several])

    def _close_rules(self, codes: Codes) -> tuple[Codes, Bools]:
        """Return the codes that are consistent with `implies` and `exclusive`, and the contradictions bool[N,2]."""
        closed = self._raise_implied(codes)
        if not self:
            return closed, np.zeros((len(codes), 2), bool)
        raised = ((codes == NEGATIVE) & (closed != NEGATIVE)).any(axis=1)
        is_present = (closed == POSITIVE) | (closed == DIFFICULT)
        excluded, doubtful = self._exclude(is_present)
        closed[excluded & ~is_present] = NEGATIVE
        for label, parents in self.parents.items():
            doubtful[:, label] |= is_present[:, label] & doubtful[:, parents].any(axis=1)
            absent = (closed[:, parents] == NEGATIVE).any(axis=1)
            closed[absent, label] = NEGATIVE
        closed[doubtful] = UNKNOWN
        return closed, np.stack([raised, doubtful.any(axis=1)], axis=1)

    def _raise_implied(self, codes: Codes) -> Codes:
        """Return label codes i8[N,K] in which all labels are present that a present label implies."""
        closed = codes.copy()
        for label, children in self.children.items():
            if children:
                for code in (DIFFICULT, POSITIVE):
                    is_present = (closed[:, children] == code).any(axis=1)
                    closed[is_present & (closed[:, label] != POSITIVE), label] = code
        return closed

    def _exclude(self, is_present: Bools) -> tuple[Bools, Bools]:
        """Find exclusive labels in images.

        Return bool[N,K] twice: whether a label is in a group with a present label, and whether it is present together
        with another label of a group.
        """
        from scipy.sparse import csr_array  # which --help does without

        labels = np.fromiter(itertools.chain(*self.exclusive), np.int32)
        ends = np.cumsum([0, *map(len, self.exclusive)])
        shape = len(self.exclusive), is_present.shape[1]
        members = csr_array((np.ones(len(labels), np.int32), labels, ends), shape=shape)
        count = csr_array(is_present, dtype=np.int32) @ members.T  # of present labels in each group
        excluded, doubtful = ((some.astype(np.int32) @ members).astype(bool).toarray() for some in (count, count > 1))
        return excluded, doubtful & is_present

    def add_implied(self, is_present: Bools) -> Bools:
        """Return a copy of `is_present`, bool[N,K], in which all labels are True that a present label implies."""
        is_present = is_present.copy()
        for label, children in self.children.items():
            is_present[:, label] |= is_present[:, children].any(axis=1)
        return is_present

    def dump(self) -> str:
        """Return the tree as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str, names: Sequence[str]) -> LabelTree:
        """Return the tree from the result of `dump`.

        Raises ValueError if it is contradictory or `names` are too few, and errors of other types for other JSON.
        """
        stored = json.loads(text)
        attributes = [
            Attribute(str(item["name"]), tuple(item["labels"]), bool(item["optional"])) for item in stored["attributes"]
        ]
        implies = tuple((label, parent) for label, parent in stored["implies"])
        tree = cls(implies, tuple(map(tuple, stored["exclusive"])), tuple(attributes))
        labels = itertools.chain(*tree.implies, *tree.exclusive, *(item.labels for item in attributes))
        if not all(isinstance(label, int) and 0 <= label < len(names) for label in labels):
            raise ValueError(f"its tree has other labels than its {len(names)} names")
        if problem := tree.find_contradiction(names):
            raise ValueError(problem)
        return tree


INDEPENDENT = LabelTree()  # labels that imply and exclude nothing


def read_tree(path: PathLike, names: Sequence[str]) -> LabelTree:
    """Read a label tree from a YAML file.

    Raises UserError if the file is missing or has another form, a label is unknown, or the tree has a contradiction.
    """
    number = {name: k for k, name in enumerate(names)}
    with damage_explained(path):
        pairs, groups = _read_names(path)
        unknown = next((name for name in itertools.chain(*pairs, *groups) if name not in number), None)
        if unknown is not None:
            raise UserError(
                f"{path} names '{unknown}', which is not one of the {len(names):,} labels; correct it, or add it to "
                "the file of data.classes"
            )
        implies, exclusive = ([tuple(map(number.__getitem__, some)) for some in given] for given in (pairs, groups))
        tree = LabelTree(tuple(implies), tuple({frozenset(group): group for group in exclusive}.values()))
    if not tree:
        raise UserError(f"{path} has no labels; {_FORM}")
    if problem := tree.find_contradiction(names):
        raise UserError(f"{path} cannot hold: {problem}; correct it")
    return tree


def _read_names(path: PathLike) -> tuple[list[tuple[str, str]], list[list[str]]]:
    """Return the pairs (label, implied label) and the groups of exclusive labels of a YAML file."""
    content = yaml.load(read_text(path, MOST_TREE), Loader=TextLoader) or {}
    if wrong := sorted(set(content) - {"implies", "exclusive"}):
        raise UserError(f"{path} has {wrong[0]}, which is neither implies nor exclusive; {_FORM}")
    implies, exclusive = content.get("implies") or {}, content.get("exclusive") or []
    if not (isinstance(implies, dict) and isinstance(exclusive, list)):
        raise UserError(f"{path} has another form; {_FORM}")
    implied, groups = {name: _to_list(others) for name, others in implies.items()}, [*map(_to_list, exclusive)]
    if sum(map(len, itertools.chain(implied.values(), groups))) > MOST_LABELS:  # a small file can repeat a list
        raise UserError(f"{path} names more than {MOST_LABELS:,} labels; shorten its lists")
    return [(name, other) for name, others in implied.items() for other in others], groups


class TextLoader(getattr(yaml, "CBaseLoader", yaml.BaseLoader)):  # libyaml is ten times as fast
    """A YAML loader that reads all values as text, such as `no` and `1`, and refuses a mapping with a repeated key."""

    def construct_scalar(self, node: yaml.ScalarNode) -> str:
        """Return a value as text in Unicode's form NFC, as the names of labels."""
        return compose(super().construct_scalar(node))

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        """Return a mapping as a dict; ValueError if a key is repeated."""
        known: set[str] = set()
        for key, _ in node.value:
            if key.value in known:
                raise ValueError(f"line {key.start_mark.line + 1} gives '{key.value}' again; give it once, with a list")
            known.add(key.value)
        return super().construct_mapping(node, deep)


def _to_list(names: Any) -> list[str]:
    """Return a list of labels from the YAML value of one or several labels; ValueError if it is another value."""
    names = [names] if isinstance(names, str) else names
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"a value is no label or list of labels; {_FORM}")  # a small file can repeat it to any length
    return names
