"""Weights that do not fit, that cannot be read or written, and that nobody has."""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.layouts import load_as
from helpers.official_models import columns_first, family, make_model, random_tensors
from helpers.paths import PARITY
from helpers.refusals import CUT, EMPTY, GONE, Refusal, damaged, each
from helpers.tensor_files import DINOV2, PLAIN, REGISTERS, assert_equal, changed, make_vit, timm, values_of, write
from helpers.twins import below

from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.backbones.efficientnet import EfficientNetLiteShape
from mlmoe_jax.models.backbones.entry import BackboneEntry
from mlmoe_jax.models.backbones.vit import ViT
from mlmoe_jax.models.heads.linear import LinearHead
from mlmoe_jax.pretrained.load import load_weights, read_tensors
from mlmoe_jax.pretrained.locate import backbone_file
from mlmoe_jax.pretrained.official import export_official, load_official, official_tensors, require_writable
from mlmoe_jax.pretrained.rules.base import Layout, Rule
from mlmoe_jax.pretrained.rules.head_names import label_bias, label_kernel, pointwise


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


# ------------------------------------------------------------------------------------------- files and whom they fill
def of_tensors(name: str, tensors, make_module, *says: str, load=load_weights, file="w.npz") -> Refusal:
    """The file of the tensors that `tensors` returns, and a module that does not become what the file says."""
    return Refusal(name, lambda at: write(at / file, tensors()), lambda path: load(make_module(), path), *says)


def load_nothing(module: nnx.Module, path: Path) -> None:
    """Load weights, and assert that the module keeps its values if they are refused."""
    before = values_of(module)
    try:
        load_weights(module, path)
    finally:
        assert_equal(module, before)


def of_vit(name: str, says: str, changes: Mapping | tuple = (), *, file=PLAIN, model=PLAIN, dtype="float32") -> Refusal:
    """A ViT of the shape `file` in timm's layout, with other tensors, and one of the shape `model`."""

    def tensors():
        whole = timm(values_of(make_vit(file, 1)))
        return changed({f"module.{key}": x.astype(jnp.dtype(dtype)) for key, x in whole.items()}, changes)

    return of_tensors(name, tensors, lambda: make_vit(model, 2), says, load=load_nothing, file="w.safetensors")


def of_toy(says: str, *rules: Rule, **tensors) -> Refusal:
    """A layer in a layout with these rules for its kernel."""
    load = functools.partial(load_as, Layout("toy", "a", rules, optional=("bias",)))
    return of_tensors(says, lambda: tensors, lambda: nnx.Linear(2, 6, rngs=nnx.Rngs(0)), says, load=load)


def of_code(file: str, model: str, *says: str, change=dict, **settings) -> Refusal:
    """A checkpoint of the authors' code for the model `file`, after a change, and the model `model`."""

    def tensors():
        return change(family.state_dict(file) if file in family.CASES else random_tensors(file))

    make_module = lambda: make_model(model, **settings)  # noqa: E731
    return of_tensors(f"{file} for {model} {says[0][-30:]}", tensors, make_module, *says, load=load_official)


def efficientnet_with_excitation() -> dict:
    tensors = below(np.load(PARITY / "efficientnet.npz"), "weights/")
    return tensors | {"_blocks.0._se_reduce.weight": ones(4, 8, 1, 1)}


def efficientnet() -> nnx.Module:
    shape = EfficientNetLiteShape((1, 2, 2, 1, 1, 1, 1), (16, 8, 8, 8, 16, 8, 16), stem=8, width=320)
    return nnx.eval_shape(lambda: shape.build(rngs=nnx.Rngs(0)))


FITTING = "w.safetensors (timm layout) does not fit the model: "
ON_MAE = "comes from code that classifies the mean of prompts and patches, as on MAE; set config.model.head.pool=mean"
CLASS_TOKEN = "comes from code that classifies the class token; set config.model.head.pool=cls"
MISFITS = [
    of_vit(
        "missing tensors",
        FITTING + "no tensor for blocks/1/mlp/fc1/bias; no tensor for norm/scale",
        {"module.blocks.1.mlp.fc1.bias": None, "module.norm.weight": None},
    ),
    of_vit(
        "other shapes, and one of the same size that may not be reshaped",
        FITTING + "blocks/0/attn/proj/kernel has shape (17, 16) instead of (16, 16); "
        "cls_token has shape (16,) instead of (1, 1, 16); pos_embed has shape (1, 4, 16) instead of (1, 5, 16)",
        {
            "module.pos_embed": ones(1, 4, 16),
            "module.blocks.0.attn.proj.weight": ones(16, 17),
            "module.cls_token": ones(16),
        },
    ),
    of_vit(
        "a shape that the layout cannot have",
        "tensor module.patch_embed.proj.weight of shape (16, 12) does not fit the timm layout",
        {"module.patch_embed.proj.weight": ones(16, 12)},
    ),
    of_vit(
        "unknown tensors, as they are named in the file",
        FITTING + "tensor module.blocks.0.adapter is unknown; tensor scheduler is unknown",
        {"module.blocks.0.adapter": ones(3), "scheduler": ones(3)},
    ),
    of_vit(
        "two tensors for one parameter",
        "more than one tensor would become blocks/1/norm1/bias, such as module.blocks.",
        {"module.blocks.0.1.norm1.bias": ones(16)},
    ),
    of_vit(
        "integers",
        "norm/scale is of type int8 instead of a floating-point type",
        {"module.norm.weight": np.ones(16, np.int8)},
    ),
    *(
        of_vit(
            f"{value} in {dtype}",
            "tensor module.norm.bias in {at}/w.safetensors has non-finite numbers",
            {"module.norm.bias": np.array([*range(15), value], jnp.dtype(dtype))},
            dtype=dtype,
        )
        for dtype, value in (("float32", np.nan), ("float16", np.inf), ("bfloat16", -np.inf))
    ),
    of_vit("registers", "register_tokens is not a parameter of this model", file=REGISTERS, model=DINOV2),
    of_tensors(
        "a network of the layout with more layers",
        efficientnet_with_excitation,
        efficientnet,
        "tensor _blocks.0._se_reduce.weight is unknown",
    ),
    of_toy(
        "w.npz has tensors of shapes that do not fit together: ",
        *(Rule(name, "kernel", index=(place,), axes=(-1,)) for place, name in enumerate("ab")),
        a=ones(2, 3),
        b=ones(4, 3),
    ),
    *(
        of_toy(f"tensor a of shape {shape} does not fit the toy layout", Rule("a", "kernel", transform), a=ones(*shape))
        for transform, shape in ((pointwise, (2, 3, 3, 3)), (label_kernel, (2, 3, 3)), (label_bias, (2, 3)))
    ),
    *(
        of_tensors(
            f"an unknown layout: {first}",
            lambda names=names: {name: ones(1) for name in names},
            lambda: make_vit(PLAIN, 2),
            "{at}/w.npz has an unknown layout; its first tensors are " + first,
        )
        for names, first in ((("b.bias", "a.weight", "x", "y"), "a.weight, b.bias, x"), ((), "none"))
    ),
    of_code("gate_vpt_mae", "gate_vpt", "(vpt_shallow_timm layout) " + ON_MAE),  # the same names on MAE and MoCo v3
    of_code("vpt_deep_mae", "vpt_deep", "(vpt_deep_mae layout) " + ON_MAE),
    of_code("vpt_deep", "vpt_deep_mae", CLASS_TOKEN),
    of_code("gate_vpt_mae", "gate_vpt_mae", CLASS_TOKEN, change=columns_first),
    of_code(
        "VPT deep",
        "VPT shallow",
        "(vpt_deep layout) does not fit the model: no tensor for prompts/shallow; prompts/deep is not a parameter of ",
    ),
    of_code("E2VPT", "E2VPT", "prompts/segment_mask is not a parameter of this model", pruning="none"),
    of_code(
        "GateVPT",
        "GateVPT",
        "(timm layout) does not hold a whole model; set config.model.backbone.weights to it if it is a backbone",
        change=lambda tensors: {key: x for key, x in tensors.items() if not re.match("prompt|gate|temp", key)},
    ),
    of_code(
        "ML-VPT on MAE",
        "ML-VPT on MAE",
        "tensor co_fc.W of shape (2, 7, 48) does not fit the ml_vpt layout",
        change=lambda tensors: tensors | {"co_fc.W": ones(2, 7, 48)},
    ),
]


@each(MISFITS)
def test_tensors_that_do_not_fit(case, tmp_path):
    assert case.check(tmp_path).count("; ") < 6, "at most six mistakes are named"


# ------------------------------------------------------------------------------------------------- files by themselves
def of_file(name: str, file: str, how, *says: str) -> Refusal:
    """A file of two tensors to which something happened."""
    tensors = {"a": np.ones(2, jnp.bfloat16), "b": np.ones(2, jnp.float8_e4m3fn)} if how is None else {"a": ones(200)}
    make = lambda at: write(at / file, tensors)  # noqa: E731
    return damaged(f"{name} {file}", make, file, how or (lambda content: content), read_tensors, *says)


def in_place_of_a_file(folder):
    (folder / "w.npz").mkdir()
    return folder / "w.npz"


NOT_WEIGHTS = "weights are read from .safetensors, .npz, .pth, .pth.tar, .pt, .bin files, not from "
DAMAGE = [
    *(
        of_file(name, file, how, f"{{at}}/{file} is damaged: ")
        for file in ("w.safetensors", "w.npz")
        for name, how in {"cut": CUT, "empty": EMPTY, "other": b"\x80 no weights at all"}.items()
    ),
    of_file("missing", "w.npz", GONE, "cannot read {at}/w.npz: No such file or directory"),
    of_file("missing", "w.safetensors", GONE, "cannot read {at}/w.safetensors: No such file or directory"),
    Refusal("a folder", in_place_of_a_file, read_tensors, "cannot read {at}/w.npz: Is a directory"),
    of_file("types that numpy lacks in", "w.safetensors", None, "{at}/w.safetensors is damaged: "),
    *(
        Refusal(name, lambda at, name=name: at / name, read_tensors, NOT_WEIGHTS + name)
        for name in ("weights.h5", "weights", "weights.safetensors.part")
    ),
]


@each(DAMAGE)
def test_files_that_cannot_be_read(case, tmp_path):
    case.check(tmp_path)


# --------------------------------------------------------------------------------------------------- models and places
def of_export(name: str, model: str, change, says: str) -> Refusal:
    """A model of the authors' code after a change."""

    def call(folder):
        made = make_model(model)
        change(made)
        export_official(made, folder / "out.npz")

    return Refusal(name, None, call, says)


def rotate(model):
    shape = dataclasses.replace(model.backbone.shape, rotary_base=100.0)
    model.backbone = nnx.eval_shape(lambda: ViT(shape, rngs=nnx.Rngs(0)))


def pool_both(model):
    model.head = LinearHead(48, 3, pool="both", rngs=nnx.Rngs(0))


def use_positions_of_mae(model):
    assert official_tensors(model)[0].name == "vpt_shallow_timm"
    model.backbone.pos_embed = nnx.Param(jnp.asarray(family.positions_of_mae()))


def of_entry(name: str, *says: str, entry: BackboneEntry | None = None) -> Refusal:
    """The weights of a backbone, perhaps one with this entry, beside an empty cache."""

    @contextlib.contextmanager
    def make(at):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MLMOE_CACHE", str(at))
            if entry:
                patch.setitem(catalog.CATALOG, name, entry)
            yield name

    return Refusal(f"weights of {name}", make, backbone_file, *says)


NO_LAYOUT = "no layout of the authors' code has names for all parameters of this model and the same pooling"
UNKNOWN = "for model.backbone.name; "
REFUSALS = [
    of_export("code that pools otherwise", "gate_vpt", use_positions_of_mae, NO_LAYOUT),
    of_export("E2VPT, which is only read", "E2VPT", lambda model: None, NO_LAYOUT),
    of_export("no counterpart", "VPT deep", pool_both, NO_LAYOUT),
    of_export(
        "rotary positions",
        "VPT deep",
        rotate,
        "the authors' code has no ViT with rotary positions, so there is no layout for this model",
    ),
    Refusal(
        "a suffix",
        lambda at: at / "out.h5",
        require_writable,
        "a state dict is written to .safetensors and .npz files, not to 'out.h5'",
    ),
    Refusal(
        "no folder",
        lambda at: at / "no" / "out.npz",
        require_writable,
        "there is no folder {at}/no to write out.npz into",
    ),
    of_entry("resnet-50", f"there is no backbone 'resnet-50' {UNKNOWN}did you mean 'resnet50'?"),
    of_entry("mine", f"there is no backbone 'mine' {UNKNOWN}there are {', '.join(catalog.CATALOG)}"),
    of_entry(
        "ours",
        "no weights of ours are published; start on random weights with --config.model.backbone.weights=none or name a "
        "file there",
        entry=BackboneEntry(PLAIN, (0.5,) * 3, (0.5,) * 3, image_size=8),
    ),
    of_entry(
        "dinov3_vitb16",
        "model.safetensors is not in {at}/dinov3-vitb16-pretrain-lvd1689m and cannot be downloaded from "
        "https://huggingface.co/facebook/dinov3-vitb16-pretrain-lvd1689m/resolve/main/model.safetensors, whose DINOv3 "
        "License has to be accepted at https://huggingface.co/facebook/dinov3-vitb16-pretrain-lvd1689m first, because ",
        "put a copy of the file at {at}/dinov3-vitb16-pretrain-lvd1689m/model.safetensors",
    ),
]


@each(REFUSALS)
def test_refusals(case, tmp_path):
    case.check(tmp_path)
