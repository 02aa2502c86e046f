"""Published rates of accelerators, and their names in JAX."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """Published rates of a chip per second.

    Attributes:
      flops: dense bfloat16.
      memory: HBM bytes.
      link: bytes of one link of its interconnect in one direction; 0 = not needed here.
    """

    flops: float
    memory: float
    link: float = 0.0


# cloud.google.com/tpu/docs/v4, v5e, v5p and v6e for the first two; jax-ml.github.io/scaling-book/tpus for the links;
# NVIDIA's data sheets, without sparsity.
CHIPS = {
    "v4": Chip(275e12, 1228e9),
    "v5e": Chip(197e12, 819e9, 5e10),
    "v5p": Chip(459e12, 2765e9, 1e11),
    "v6e": Chip(918e12, 1638e9, 1e11),
    "A100": Chip(312e12, 2039e9),
    "H100 SXM": Chip(989e12, 3350e9),
    "H100 PCIe": Chip(756e12, 2000e9),
    "H100 NVL": Chip(835e12, 3900e9),
    "H200": Chip(989e12, 4800e9),
    "L4": Chip(121e12, 300e9),
}
# What JAX calls a device that is one chip -> its name above. A device of TPU v2 and v3 is half a chip.
_NAMES = {
    "TPU v4": "v4",
    "TPU v5 lite|TPU v5e": "v5e",
    "TPU v5p?": "v5p",
    "TPU v6 lite|TPU v6e": "v6e",
    "NVIDIA A100.*80GB": "A100",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H200": "H200",
    "NVIDIA L4": "L4",
}


def chip_of(device_kind: str) -> Chip | None:
    """Return the rates of a device by its name in JAX; None if they are not known."""
    names = (name for pattern, name in _NAMES.items() if re.fullmatch(pattern, device_kind))
    return CHIPS.get(next(names, ""))
