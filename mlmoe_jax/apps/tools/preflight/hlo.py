"""The collectives of a compiled program, read from its text (`compiled.as_text()`).

The text is the program of one device, so every size here is per device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

_KINDS = "ragged-all-to-all|all-to-all|all-reduce|all-gather|reduce-scatter|collective-permute|collective-broadcast"
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_COLLECTIVE = re.compile(rf"\s+(?:ROOT )?%?([\w.\-]+) = (.+?) ({_KINDS})(?:-start)?\((.*)")
_DONE = re.compile(rf" = (.+?) (?:{_KINDS})-done\((?:.* )?%?([\w.\-]+)\)")
_ATTRIBUTES = "body|calls|to_apply|branch_computations|true_computation"
_CALL = re.compile(rf" (while|conditional|fusion|call|async-start)\(.*?\b(?:{_ATTRIBUTES})=(.*)")
_WORD = re.compile(r"%?([\w.\-]+)")


class Collective(NamedTuple):
    """One collective operation of a program.

    kind: such as all-reduce. bytes: of the whole array on a device, which is the result, or the operand of a
    reduce-scatter. group: the number of devices that communicate with one another. times: the number of executions in
    one run of the program. counted: False in a loop of unknown length, which counts as one iteration.
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
    return 8 if element == "pred" else int(re.match(r"[a-z]+(\d+)", element)[1])


def collectives(text: str, devices: int) -> list[Collective]:
    """Return the collectives among more than one device in one run of the program, in program order.

    `-start` and `-done` count as one operation, and so do the pieces of a collective that the TPU compiler distributes
    over several fusions. A conditional counts as its branch with the most traffic.

    Args:
      text: of a compiled program.
      devices: the number of devices of the program.
    """
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            lines = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        lines.append(line)
    done = {name: shape for shape, name in _DONE.findall(text)}

    def walk(name: str, times: int, counted: bool, channels: set[str]) -> list[Collective]:
        """Return the collectives of a computation; channels: seen in this iteration of the innermost loop."""
        rows = []
        for line in computations[name]:
            if match := _COLLECTIVE.match(line):
                result, shape, kind, rest = match.groups()
                channel = re.search(r"channel_id=(\d+)", rest)
                if channel is None or channel[1] not in channels:
                    group, size = _group(rest, devices), shape_bytes(done.get(result, shape))
                    size = size * group if kind == "reduce-scatter" else size
                    if name.startswith("all-reduce-scatter"):  # the TPU compiler's form of a reduce-scatter
                        kind = "reduce-scatter"
                    rows.append(Collective(kind, size, group, times, counted))
                channels |= {channel[1]} if channel else set()
            elif match := _CALL.search(line):
                opcode, called = match.groups()
                if opcode == "while":
                    trips = _trips(line, computations)
                    rows += walk(_WORD.match(called)[1], times * (trips or 1), counted and trips is not None, set())
                elif opcode == "conditional":
                    names = re.findall(r"%([\w.\-]+)", called.partition("metadata=")[0])
                    branches = [walk(branch, times, counted, set(channels)) for branch in names]
                    rows += max(branches, key=lambda branch: sum(one.wire_bytes for one in branch))
                else:
                    rows += walk(_WORD.match(called)[1], times, counted, channels)
        return rows

    return [one for one in walk(entry, 1, True, set()) if one.group > 1]


def _trips(loop: str, computations: dict[str, list[str]]) -> int | None:
    """Return the trip count of a loop, noted by the compiler or from a condition `i < constant`; None if unknown.

    The TPU compiler notes none. Loops of `jax.lax.scan` count from 0.
    """
    if known := re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', loop):
        return int(known[1])
    condition = computations[re.search(r"\bcondition=%?([\w.\-]+)", loop)[1]]
    limits = re.findall(r" constant\((\d+)\)", "\n".join(condition))
    counts = any("ROOT " in line and "direction=LT" in line for line in condition)
    return int(limits[0]) if counts and len(limits) == 1 else None


def _group(attributes: str, devices: int) -> int:
    """Return the size of a group from any of the printed forms of `replica_groups`."""
    if "source_target_pairs=" in attributes:
        return devices if "source_target_pairs={}" not in attributes else 1
    if mesh := re.search(r"replica_groups=@?\w*mesh\w*\[(.*?)\][^{]*\{(.*?)\}", attributes):
        sizes = dict(re.findall(r"'?(\w+)'?=(\d+)", mesh[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])  # 'axis', or 'axis':(before)size for a part of it
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", attributes):
        return int(iota[2])
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return listed[1].count(",") + 1
    return devices  # no groups, or an empty list: all devices


def totals(rows: Iterable[Collective]) -> dict[str, dict[str, float]]:
    """Return the number of executions, the bytes and the bytes on the wire per kind, for one device."""
    summed: dict[str, dict[str, float]] = {}
    for one in rows:
        row = summed.setdefault(one.kind, {"count": 0, "bytes": 0, "wire_bytes": 0.0})
        row["count"] += one.times
        row["bytes"] += one.times * one.bytes
        row["wire_bytes"] += one.wire_bytes
    return dict(sorted(summed.items()))
