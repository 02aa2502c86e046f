"""Published rates of accelerators, and their names in JAX."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """Published rates of a chip per second.

    Attributes:
      names: regular expression of what JAX calls a device that is one such chip.
      flops: dense bfloat16.
      memory: HBM bytes.
      link: bytes of one link of its interconnect in one direction; 0 = not needed here.
    """

    names: str
    flops: float
    memory: float
    link: float = 0.0


# cloud.google.com/tpu/docs/v4, v5e, v5p and v6e for the first two; jax-ml.github.io/scaling-book/tpus for the links;
# NVIDIA's data sheets, without sparsity. A device of TPU v2 and v3 is half a chip.
CHIPS = {
    "v4": Chip("TPU v4", 275e12, 1228e9),
    "v5e": Chip("TPU v5 lite|TPU v5e", 197e12, 819e9, 5e10),
    "v5p": Chip("TPU v5p?", 459e12, 2765e9, 1e11),
    "v6e": Chip("TPU v6 lite|TPU v6e", 918e12, 1638e9, 1e11),
    "A100": Chip("NVIDIA A100.*80GB", 312e12, 2039e9),
    "H100 SXM": Chip("NVIDIA H100 80GB HBM3", 989e12, 3350e9),
    "H100 PCIe": Chip("NVIDIA H100 PCIe", 756e12, 2000e9),
    "H100 NVL": Chip("NVIDIA H100 NVL", 835e12, 3900e9),
    "H200": Chip("NVIDIA H200", 989e12, 4800e9),
    "L4": Chip("NVIDIA L4", 121e12, 300e9),
}


def chip_of(device_kind: str) -> Chip | None:
    """Return the rates of a device by its name in JAX; None if they are not known."""
    return next((chip for chip in CHIPS.values() if re.fullmatch(chip.names, device_kind)), None)
