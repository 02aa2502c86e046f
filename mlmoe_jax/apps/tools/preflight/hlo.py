"""Read the collective operations of a compiled program from its HLO text, `compiled.as_text()`.

The text is the program of one device, so every size is per device.
"""

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

_KINDS = "ragged-all-to-all|all-to-all|all-reduce|all-gather|reduce-scatter|collective-permute|collective-broadcast"
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_COLLECTIVE = re.compile(rf"\s+(?:ROOT )?%?([\w.\-]+) = (.+?) ({_KINDS})(?:-start)?\((.*)")
_DONE = re.compile(rf" = (.+?) (?:{_KINDS})-done\((?:.* )?%?([\w.\-]+)\)")


class Collective(NamedTuple):
    """One collective operation of a program.

    Attributes:
      kind: the name of the operation, such as all-reduce.
      bytes: per device, of the operand for a reduce-scatter, and of the result for all other kinds.
      group: the number of devices in a group, which communicate with one another.
    """

    kind: str
    bytes: int
    group: int

    @property
    def wire_bytes(self) -> float:
        """The number of bytes that each device sends if ring algorithms are used (Thakur et al., 2005)."""
        share = (self.group - 1) / self.group
        per_byte = {"all-reduce": 2 * share, "collective-permute": 1.0, "collective-broadcast": 1.0}
        return self.bytes * per_byte.get(self.kind, share)


def shape_bytes(shape: str) -> int:
    """Return the bytes, without padding, of arrays in HLO text such as `(bf16[8,128]{1,0:T(8,128)}, u32[])`."""
    elements = re.findall(r"([a-z]+)(\d*)\w*\[([\d,<=]*)\]", shape)
    return sum(
        math.ceil(int(bits or 8) * math.prod(int(size.lstrip("<=")) for size in sizes.split(",") if size) / 8)
        for kind, bits, sizes in elements
        if kind != "token"
    )


def collectives(text: str, devices: int) -> list[Collective]:
    """Return the collective operations of a program among at least two devices, in the order of the text.

    A collective in a loop is counted once. A pair of `-start` and `-done` operations is one collective. Several fusions
    with the same channel are also one, because the TPU compiler may split a collective in this way.
    """
    results = {name: shape for shape, name in _DONE.findall(text)}
    computation, rows = "", {}
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            computation = header[1]
        elif match := _COLLECTIVE.match(line):
            result, shape, kind, rest = match.groups()
            channel = re.search(r"channel_id=(\d+)", rest)
            group, size = _group(rest, devices), shape_bytes(results.get(result, shape))
            size = size * group if kind == "reduce-scatter" else size
            if computation.startswith("all-reduce-scatter"):  # the TPU compiler's form of a reduce-scatter
                kind = "reduce-scatter"
            rows.setdefault(channel[1] if channel else result, Collective(kind, size, group))
    return [collective for collective in rows.values() if collective.group > 1]


def _group(attributes: str, devices: int) -> int:
    """Return the number of devices in a group from `replica_groups` in any of its forms; `devices` if it is missing."""
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


def totals(collectives: Iterable[Collective]) -> dict[str, dict[str, float]]:
    """Return kind of collective -> its `count`, total `bytes` and total `wire_bytes`, per device."""
    summed: dict[str, dict[str, float]] = {}
    for collective in collectives:
        row = summed.setdefault(collective.kind, {"count": 0, "bytes": 0, "wire_bytes": 0.0})
        row["count"] += 1
        row["bytes"] += collective.bytes
        row["wire_bytes"] += collective.wire_bytes
    return dict(sorted(summed.items()))
