"""Compare DINOv2-B at full size with PyTorch, with random weights stored in the published file format.

    python -m benchmarks.full_size_parity --torch=PYTHON [--sides=224,448]

`--torch` is a Python interpreter with torch and transformers. Prints the number of parameters, and the largest
difference of the output relative to the largest entry, with and without the last norm.
"""

import argparse
import dataclasses
import subprocess
import tempfile
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.backbones.vit import ViT
from mlmoe_jax.models.contracts import CLS, PATCHES
from mlmoe_jax.pretrained.load import load_weights


def tokens(vit: ViT, pixels: np.ndarray, *, norm: bool) -> np.ndarray:
    """f32[B,3,H,W] -> class and patch tokens f32[B,1+N,D]."""
    features = vit(pixels.transpose(0, 2, 3, 1), read=(CLS, PATCHES), norm=norm)
    return np.concatenate([features.cls[:, None], features.patches], axis=1)


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the largest difference relative to the largest entry."""
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", required=True)
    parser.add_argument("--sides", default="224,448")
    options = parser.parse_args()
    jax.config.update("jax_default_matmul_precision", "highest")
    # transformers resamples positions by size, the DINOv2 repository by scale with an offset
    shape = dataclasses.replace(catalog.entry("dinov2_vitb14").shape, position_offset=0.0)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(__file__).with_name("full_size_parity_torch.py")
        subprocess.run([options.torch, program, folder, *options.sides.split(",")], check=True)
        vit = ViT(shape, rngs=nnx.Rngs(0))
        report = load_weights(vit, Path(folder) / "model.safetensors")
        count = sum(value.size for value in jax.tree.leaves(nnx.state(vit, nnx.Param)))
        print(f"{report.source}: {len(report.loaded)} values, {count:,} parameters, unused {list(report.unused)}")
        for side in options.sides.split(","):
            theirs = np.load(Path(folder) / f"{side}.npz")
            before = difference(tokens(vit, theirs["pixels"], norm=False), theirs["blocks"][-1])
            after = difference(tokens(vit, theirs["pixels"], norm=True), theirs["last"])
            print(f"{side} px, {theirs['last'].shape[1]} tokens: {before:.1e} before the last norm, {after:.1e} after")


if __name__ == "__main__":
    main()
