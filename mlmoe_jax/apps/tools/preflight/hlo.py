"""The collectives of a compiled program, read from its text (`compiled.as_text()`).

The text is the program of one device, so every size here is per device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclass(frozen=True)
class Collective:
    """One collective operation of a program.

    kind: one of KINDS. bytes: of the whole array on a device: of the result, or of the operand of a reduce-scatter.
    group: the number of devices that communicate with one another. times: the number of executions in one run of the
    program. counted: False in a loop of unknown length; then `times` is that of one iteration.
    """

    kind: str
    bytes: int
    group: int
    times: int = 1
    counted: bool = True

    @property
    def wire_bytes(self) -> float:
        """The bytes that each device sends in all executions with ring algorithms (Thakur et al., 2005)."""
        share = (self.group - 1) / self.group
        per_byte = {"all-reduce": 2 * share, "collective-permute": 1.0, "collective-broadcast": 1.0}
        return self.times * self.bytes * per_byte.get(self.kind, share)


def shape_bytes(shape: str) -> int:
    """Return the bytes, without padding, of a shape in HLO text, such as `(bf16[8,128]{1,0:T(8,128)}, u32[])`."""
    return sum(
        math.ceil(_bits(element) * math.prod(int(size.lstrip("<=")) for size in sizes.split(",") if size) / 8)
        for element, sizes in re.findall(r"([a-z]\w*)\[([\d,<=]*)\]", shape)
    )


def _bits(element: str) -> int:
    if element in ("token", "opaque"):
        return 0
    if element == "pred":
        return 8
    if digits := re.match(r"[a-z]+(\d+)", element):
        return int(digits[1])
    raise ValueError(f"unknown element type {element!r}")


def collectives(text: str, devices: int) -> list[Collective]:
    """Return the collectives among more than one device in one run of the program, in program order.

    `-start` and `-done` count as one operation, and so do the pieces of a collective that the TPU compiler distributes
    over several fusions. A conditional counts as its branch with the most traffic. devices: the number of devices of
    the program. Raises ValueError if the text is not that of a compiled program.
    """
    program = _Program(text, devices)
    return [one for one in program.walk(program.entry, 1, True, set()) if one.group > 1]


def totals(found: Iterable[Collective]) -> dict[str, dict[str, float]]:
    """Return the number of executions, the bytes and the bytes on the wire per kind, for one device."""
    rows: dict[str, dict[str, float]] = {}
    for one in found:
        row = rows.setdefault(one.kind, {"count": 0, "bytes": 0, "wire_bytes": 0.0})
        row["count"] += one.times
        row["bytes"] += one.times * one.bytes
        row["wire_bytes"] += one.wire_bytes
    return dict(sorted(rows.items()))


@dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    def attribute(self, key: str) -> str | None:
        """Return the name of the computation in an attribute such as `body=%name`."""
        found = re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else None


class _Program:
    """The computations of a program text, each a dict name -> instruction."""

    def __init__(self, text: str, devices: int):
        self.devices, self.entry = devices, ""
        self.computations: dict[str, dict[str, _Instruction]] = {}
        self.roots: dict[str, _Instruction] = {}
        body: dict[str, _Instruction] = {}
        name = ""
        for line in text.splitlines():
            if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$", line):
                name, body = header[2], {}
                self.computations[name] = body
                self.entry = name if header[1] else self.entry
            elif instruction := _instruction(line):
                body[instruction.name] = instruction
                if line.lstrip().startswith("ROOT "):
                    self.roots[name] = instruction
        if not self.entry:
            raise ValueError("this is not the text of a compiled program: it has no ENTRY computation")

    def walk(self, name: str, times: int, counted: bool, seen: set[str]) -> list[Collective]:
        """Return the collectives of a computation that is executed `times` times.

        seen: the channels already found in this iteration of the innermost loop; pieces of one collective share a
        channel.
        """
        found = []
        for instruction in self.computations.get(name, {}).values():
            kind = instruction.opcode.removesuffix("-start")
            if kind in KINDS:
                channel = re.search(r"channel_id=(\d+)", instruction.attributes)
                if channel is None or channel[1] not in seen:
                    found.append(self._collective(kind, instruction, times, counted))
                seen |= {channel[1]} if channel else set()
            elif kind == "while":
                trips = self._trips(name, instruction)
                body = instruction.attribute("body")
                found += self.walk(body, times * (trips or 1), counted and trips is not None, set())
            elif kind == "conditional":
                branches = re.findall(r"%([\w.\-]+)", instruction.attributes.partition("metadata=")[0])
                taken = [self.walk(branch, times, counted, set(seen)) for branch in branches]
                found += max(taken, key=lambda branch: sum(one.wire_bytes for one in branch), default=[])
            elif kind in ("fusion", "call", "async"):
                called = instruction.attribute("calls") or instruction.attribute("to_apply")
                inside = self.walk(called, times, counted, seen) if called else []
                if called and called.startswith("all-reduce-scatter"):  # the TPU compiler's form of a reduce-scatter
                    inside = [Collective("reduce-scatter", c.bytes, c.group, c.times, c.counted) for c in inside]
                found += inside
        return found

    def _collective(self, kind: str, instruction: _Instruction, times: int, counted: bool) -> Collective:
        group, size = self._group(instruction.attributes), shape_bytes(_result(kind, instruction))
        return Collective(kind, size * group if kind == "reduce-scatter" else size, group, times, counted)

    def _group(self, attributes: str) -> int:
        """Return the size of a group from any of the printed forms of `replica_groups`."""
        if "source_target_pairs=" in attributes:
            return self.devices if "source_target_pairs={}" not in attributes else 1
        if mesh := re.search(r"replica_groups=@?\w*mesh\w*\[(.*?)\][^{]*\{(.*?)\}", attributes):
            sizes = dict(re.findall(r"'?(\w+)'?=(\d+)", mesh[1]))
            axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])  # 'axis', or 'axis':(before)size for a part of it
            return math.prod(int(part or sizes[axis]) for axis, part in axes)
        if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", attributes):
            return int(iota[2])
        if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
            return listed[1].count(",") + 1
        return self.devices  # no groups, or an empty list: all devices

    def _trips(self, caller: str, loop: _Instruction) -> int | None:
        """Return the trip count of a loop, noted by the compiler or derived if it counts from 0 to a constant."""
        if known := re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', loop.attributes):
            return int(known[1])
        condition = loop.attribute("condition")
        test = self.roots.get(condition)
        if test is None or test.opcode != "compare" or "direction=LT" not in test.attributes:
            return None
        left, right = (self._source(condition, operand) for operand in test.operands)
        if left is None or right is None or left.opcode != "get-tuple-element" or right.opcode != "constant":
            return None
        start = self._source(caller, loop.operands[0])
        place = re.search(r"index=(\d+)", left.attributes)
        if start is None or start.opcode != "tuple" or place is None:
            return None
        first = self._source(caller, start.operands[int(place[1])])
        if first is None or first.opcode != "constant" or first.operands != ("0",):
            return None
        return int(right.operands[0])

    def _source(self, computation: str, name: str) -> _Instruction | None:
        """Return the instruction of that name; if it is a copy, the copied one."""
        instruction = self.computations[computation].get(name)
        while instruction is not None and instruction.opcode in ("copy", "bitcast"):
            instruction = self.computations[computation].get(instruction.operands[0])
        return instruction


def _result(kind: str, instruction: _Instruction) -> str:
    """Return the result shape of a collective; some `-start` operations return (operands, results, …)."""
    started = instruction.opcode.endswith("-start")
    return _parts(instruction.shape)[1] if started and kind != "all-reduce" else instruction.shape


def _instruction(line: str) -> _Instruction | None:
    """Parse `ROOT %name = shape opcode(%operand, …), attributes`."""
    head = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = ", line)
    if head is None:
        return None
    rest = re.sub(r"/\*.*?\*/", "", line[head.end() :])
    shape = rest[: _closing(rest) + 1] if rest.startswith("(") else rest.partition(" ")[0]
    after = rest[len(shape) :].lstrip()
    opcode, _, _ = after.partition("(")
    end = _closing(after[len(opcode) :]) + len(opcode)
    operands = tuple(part.split()[-1].lstrip("%") for part in _split(after[len(opcode) + 1 : end]) if part.strip())
    return _Instruction(head[1], shape, opcode, operands, after[end + 1 :])


def _closing(text: str) -> int:
    """Return the index of the bracket that closes the first one of `text`; the last index if there is none."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0:
            return place
    return len(text) - 1


def _split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]]


def _parts(shape: str) -> list[str]:
    """Split a tuple shape into its element shapes."""
    return [part.strip() for part in _split(shape[1:-1])] if shape.startswith("(") else [shape]
