"""Compare a ViT-B at full size with PyTorch, with random weights stored in the published file format.

    python -m benchmarks.measure full_size_parity --torch=PYTHON [--backbone=dinov2_vitb14] [--sides=224,448]

`--torch` is a Python interpreter with torch and transformers. `--backbone` is dinov2_vitb14, dinov3_vitb16,
siglip2_vitb16_224, clip_vitb16 or tipsv2_vitb14. Prints the number of parameters, and the largest difference of the
output relative to the largest entry: of the patches before and after the last norm, and of the pooled output.
"""

import dataclasses
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from benchmarks.report import ROOT
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.backbones.vit import ViT
from mlmoe_jax.models.outputs import CLS, PATCHES
from mlmoe_jax.pretrained.load import load_weights


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the largest difference relative to the largest entry."""
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@dataclasses.dataclass(frozen=True)
class Options:
    torch: str
    backbone: str = "dinov2_vitb14"
    sides: tuple[int, ...] = (224, 448)


def measure(options: Options) -> Iterator[str]:
    jax.config.update("jax_default_matmul_precision", "highest")
    # transformers resamples positions by size, the DINOv2 repository by scale with an offset
    shape = dataclasses.replace(catalog.entry(options.backbone).shape, position_offset=0.0)
    with tempfile.TemporaryDirectory() as folder:
        program = ROOT / "tools" / "parity" / "_full_size.py"
        subprocess.run([options.torch, program, folder, options.backbone, *map(str, options.sides)], check=True)
        vit = ViT(shape, rngs=nnx.Rngs(0))
        report = load_weights(vit, Path(folder) / "model.safetensors")
        count = sum(value.size for value in jax.tree.leaves(nnx.state(vit, nnx.Param)))
        yield f"{report.layout}: {len(report.loaded)} values, {count:,} parameters, unused {list(report.unused)}"
        run = jax.jit(lambda vit, pixels, norm: vit(pixels, read=(CLS, PATCHES), norm=norm), static_argnums=2)
        for side in options.sides:
            theirs = np.load(Path(folder) / f"{side}.npz")
            pixels = theirs["pixels"].transpose(0, 2, 3, 1)
            before, after = (run(vit, pixels, norm) for norm in (False, True))
            errors = (
                difference(before.patches, theirs["block"][:, shape.leading :]),
                difference(after.patches, theirs["last"][:, shape.leading :]),
                difference(after.cls, theirs["pooled"]),
            )
            yield f"{side} px, {theirs['last'].shape[1]} tokens: " + ", ".join(f"{error:.1e}" for error in errors)
