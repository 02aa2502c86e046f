"""Make torch_files/: what torch.save writes in both layouts, and the arrays that it must give (torch 2.13, CPU).

Each NAME.npz has the tensors of NAME_zip.pth and NAME_legacy.pth, types that numpy has not as float32, and
in `names` and `dtypes` what each of them is called in torch.
"""

import argparse
import random
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)
IN_NUMPY = (torch.bool, torch.complex64, torch.complex128, torch.float16, torch.float64)


def tensors_of_every_kind() -> dict[str, torch.Tensor]:
    """Return a flat state dict with every type, every kind of view, and tensors that share their storage."""
    tensors = {str(dtype).removeprefix("torch."): torch.arange(7).sub(2).abs().to(dtype) for dtype in DTYPES}
    base = torch.randn(5, 4, 6)
    buffer = torch.nn.Buffer(torch.randn(3))
    return tensors | {
        "base": base,
        "transposed": base.permute(2, 0, 1),
        "window": base[1:4, 1:3, 2:],
        "every_other": base[::2, :, 1::3],
        "expanded": base[0, :1, :1].expand(2, 3, 5),
        "half_transposed": base.to(torch.bfloat16).transpose(0, 2)[1:],
        "scalar": torch.tensor(3.25),
        "last": base.flatten()[-1],
        "empty": torch.empty(0, 3),
        "empty_view": base[:, :, 6:],
        "parameter": torch.nn.Parameter(base[2]),
        "buffer": buffer,
        "tied": tensors["float32"],
    }


def training_checkpoint() -> dict[str, object]:
    """Return what a training script saves: the state dict of a wrapped model among settings and counters."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 2), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model[2](model[1](model[0](torch.randn(2, 3, 2, 2))).flatten(1)).sum().backward()
    optimizer.step()
    wrapped = torch.nn.ModuleDict({"module": model})
    return {
        "epoch": 3,
        "arch": "small",
        "state_dict": wrapped.state_dict(),
        "optimizer": optimizer.state_dict(),
        "args": argparse.Namespace(lr=1e-3, betas=(0.9, 0.95), data=Path("data"), device=torch.device("cuda:0")),
        "best": np.float64(0.75),
        "history": np.arange(3),
        "dtype": torch.bfloat16,
        "layout": torch.strided,
        "shape": torch.Size((2, 3)),
        "labels": {"cat", "dog"},
        "raw": b"\x00\xff",
        "big": 2**70,
        "empty": OrderedDict(),
        "loss": torch.tensor(0.5),
        "random": random.getrandbits(40),
    }


def expected(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    arrays = {}
    for name, tensor in tensors.items():
        plain = tensor.dtype in IN_NUMPY or not tensor.dtype.is_floating_point
        arrays[name] = (tensor if plain else tensor.float()).detach().numpy()
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()]
    return arrays | {"names": np.array(list(tensors)), "dtypes": np.array(dtypes)}


def write(folder: Path) -> None:
    folder = folder / "torch_files"
    torch.manual_seed(0)
    random.seed(0)
    folder.mkdir(exist_ok=True)
    every_kind, checkpoint = tensors_of_every_kind(), training_checkpoint()
    state = {name.removeprefix("module."): tensor for name, tensor in checkpoint["state_dict"].items()}
    for name, content, tensors in (("kinds", every_kind, every_kind), ("training", checkpoint, state)):
        torch.save(content, folder / f"{name}_zip.pth")
        torch.save(content, folder / f"{name}_legacy.pth", _use_new_zipfile_serialization=False)
        np.savez_compressed(folder / f"{name}.npz", **expected(tensors))
    torch.jit.script(torch.nn.Linear(2, 1)).save(folder / "script.pt")
    torch.save(torch.nn.Linear(2, 1), folder / "module.pth")
