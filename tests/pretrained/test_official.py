"""Import and export of checkpoints of the authors' code, and the outputs of the imported models."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.official_models import LAYOUTS, family, listed, make_model, random_tensors
from helpers.paths import PARITY
from helpers.tensor_files import params_of, write
from helpers.twins import error
from safetensors.numpy import load_file

from mlmoe_jax.config import default_config, load_config
from mlmoe_jax.config.recipes.prompt_tuning import use_ml_vpt
from mlmoe_jax.models.backbones.vit import ViT
from mlmoe_jax.models.heads.linear import LinearHead
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.pretrained.official import (
    departures,
    export_official,
    load_official,
    official_tensors,
    require_writable,
    split_value,
)
from mlmoe_jax.pretrained.rules.base import Rule

TOLERANCE = 2e-5


# ---------------------------------------------------------------------------------------- outputs of the authors' code
_FORWARD = {}


def forward(case, name: str):
    """Return the compiled logits of a case; cases that differ only in tensor names share one program."""
    if case not in _FORWARD:
        definition, params, _ = ModelDef.split(make_model(name))
        run = jax.jit(lambda params, image: definition.merge(params)(image).logits)
        with jax.default_matmul_precision("highest"):
            lowered = run.lower(params, family.image())
        _FORWARD[case] = lowered.compile()
    return _FORWARD[case]


@pytest.mark.variants("name")
@pytest.mark.parametrize("name", family.CASES)
def test_prompt_tuned_models_equal_pytorch(tmp_path, name):
    reference, model = np.load(PARITY / "prompt_family.npz"), make_model(name)
    report = load_official(model, write(tmp_path / "weights.npz", family.state_dict(name)))
    assert report.unused == report.missing == ()
    _, params, _ = ModelDef.split(model)
    logits = forward(replace(family.CASES[name], timm=False), name)(params, family.image())
    assert error(logits, reference[f"{name}/logits"]) < TOLERANCE


# ------------------------------------------------------------------------------------------------ import and export
@pytest.mark.variants("name")
@pytest.mark.parametrize(
    ("name", "suffix"), [*((name, ".safetensors") for name in LAYOUTS if name != "E2VPT"), ("GateVPT", ".npz")]
)
def test_a_model_is_exported_with_the_names_and_shapes_of_its_code_and_imported_again(tmp_path, name, suffix):
    source, target, path = make_model(name, 1), make_model(name, 2), tmp_path / f"out{suffix}"
    assert export_official(source, path).name == LAYOUTS[name]
    assert list(tmp_path.iterdir()) == [path]
    stored = dict(np.load(path)) if suffix == ".npz" else load_file(path)
    assert {key: list(tensor.shape) for key, tensor in stored.items()} == listed(name)["keys"]
    assert {tensor.dtype for tensor in stored.values()} == {np.dtype(np.float32)}
    report = load_official(target, path)
    assert report.layout == LAYOUTS[name]
    assert report.unused == report.missing == ()
    wanted, loaded = params_of(source), params_of(target)
    assert set(report.loaded) == set(wanted)
    for place, value in wanted.items():
        assert np.array_equal(loaded[place], value), place


@pytest.mark.variants("name")
@pytest.mark.parametrize("name", [name for name in family.CASES if not name.startswith("e2vpt")])
def test_every_variant_is_exported_as_it_was_imported(tmp_path, name):
    tensors, model = family.state_dict(name), make_model(name)
    load_official(model, write(tmp_path / "in.npz", tensors))
    layout, out = official_tensors(model)
    # the class of a ViT cannot be recognized from deep prompts, and the supervised class is the first
    if not name.endswith("_timm"):
        assert {key: value.tobytes() for key, value in out.items()} == {k: v.tobytes() for k, v in tensors.items()}
    others = {"vpt_deep_projected": "vpt_deep", "gate_vpt_mae": "gate_vpt"}
    assert layout.name == others.get(name, name.removesuffix("_timm"))


@pytest.mark.parametrize(
    ("name", "other"), [("gate_vpt_mae", "gate_vpt"), ("vpt_deep_mae", "vpt_deep"), ("e2vpt_mae", "e2vpt_unshared")]
)
def test_a_file_whose_code_pools_otherwise_is_refused(refusal, tmp_path, name, other):
    path = write(tmp_path / "on_mae.npz", family.state_dict(name))
    sentence = refusal(load_official, make_model(other), path)
    layout = name if name != "gate_vpt_mae" else "gate_vpt"  # the same names on MAE and MoCo v3
    assert sentence == (
        f"{path} ({layout} layout) comes from code that classifies the mean of prompts and patches, as on MAE; set "
        "config.model.head.pool=mean"
    )


def test_a_class_token_is_not_read_as_a_mean(refusal, tmp_path):
    path = write(tmp_path / "a.npz", family.state_dict("vpt_deep"))
    sentence = refusal(load_official, make_model("vpt_deep_mae"), path)
    assert sentence.endswith("comes from code that classifies the class token; set config.model.head.pool=cls")


def test_gate_vpt_on_mae_and_on_moco_v3_differ_in_their_positions(refusal, tmp_path):
    tensors, model = family.state_dict("gate_vpt_mae"), make_model("gate_vpt_mae")
    table = tensors["pos_embed"][:, 1:].reshape(1, 4, 4, -1)
    assert np.abs(table[:, :, 1] - table[:, :, 0]).max() > 0.8  # the first channels depend on the column
    tensors["pos_embed"][:, 1:] = table.swapaxes(1, 2).reshape(1, 16, -1)
    path = write(tmp_path / "moco.npz", tensors)
    assert refusal(load_official, model, path).endswith("set config.model.head.pool=cls")
    load_official(make_model("gate_vpt"), path)
    tensors["pos_embed"] = tensors["pos_embed"].astype(np.float16).astype(np.float32)
    path = write(tmp_path / "half.npz", tensors)
    assert refusal(load_official, model, path).endswith("set config.model.head.pool=cls")


def test_a_model_that_its_code_would_pool_otherwise_is_not_exported(refusal):
    model, on_mae = make_model("gate_vpt"), family.positions_of_mae()
    assert official_tensors(model)[0].name == "gate_vpt"
    model.backbone.pos_embed = nnx.Param(jnp.asarray(on_mae))
    assert "the same pooling" in refusal(official_tensors, model)


def test_deep_prompts_on_dinov2_keep_its_names():
    """VPT has no code for DINOv2; its classes for other self-supervised ViTs name blocks as DINOv2 does."""
    model = make_model("ML-VPT on DINOv2")
    model.head, model.prompts.mask = make_model("VPT deep").head, None
    source, tensors = official_tensors(model)
    assert source.name == "vpt_deep_timm"
    assert {"blocks.0.ls1.gamma", "deep_prompt_embeddings", "mask_token", "head.weight"} < set(tensors)


def test_linear_probing_has_the_layout_of_the_vpt_code():
    model = make_model("VPT deep")
    model.prompts = None
    source, tensors = official_tensors(model)
    assert source.name == "vpt"
    assert not any("prompt" in key for key in tensors)


def test_e2vpt_is_read_but_not_written(refusal, tmp_path):
    report = load_official(make_model("E2VPT"), write(tmp_path / "in.npz", random_tensors("E2VPT")))
    assert report.unused == report.missing == ()
    assert "no layout" in refusal(export_official, make_model("E2VPT"), tmp_path / "out.npz")


# ----------------------------------------------------------------------------------------------------- wrapped files
def in_a_classifier(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return tensors with the names of the VPT code for an encoder inside its classifier."""
    names = {key: f"enc.{key}".replace("enc.head.", "head.last_layer.") for key in tensors}
    return {names[key]: tensor for key, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("name", "wrapper"),
    [("VPT deep", "model."), ("VPT shallow", "module."), ("ML-VPT on MAE", "model.module."), ("GateVPT", "")],
)
def test_wrapped_files_are_read(tmp_path, name, wrapper):
    tensors, model = random_tensors(name), make_model(name)
    named = tensors if name.startswith("ML-VPT") else in_a_classifier(tensors)
    inside = {wrapper + key: tensor for key, tensor in named.items()}
    report = load_official(model, write(tmp_path / "weights.safetensors", inside))
    assert report.unused == report.missing == ()
    for key, value in official_tensors(model)[1].items():
        np.testing.assert_array_equal(value, tensors[key], err_msg=key)


def test_a_position_table_resampled_by_the_code_is_loaded(tmp_path):
    name = "ML-VPT on MAE"
    tensors, model = random_tensors(name), make_model(name)
    tensors["img_encoder.pos_embed"] = np.random.default_rng(1).normal(size=(1, 1 + 36, 48)).astype(np.float32)
    path = write(tmp_path / "weights.npz", tensors)
    load_official(model, path)
    image = jnp.zeros((1, 96, 96, 3))
    embedded, grid = model.backbone.embed(image)
    assert grid == (6, 6)
    expected = tensors["img_encoder.pos_embed"] + np.asarray(model.backbone.patch_embed.bias[...])
    np.testing.assert_allclose(embedded[0, 1:], expected[0, 1:], atol=1e-6)
    assert np.array_equal(official_tensors(model)[1]["img_encoder.pos_embed"], tensors["img_encoder.pos_embed"])


# ------------------------------------------------------------------------------------------------------- mistakes
def test_another_number_of_labels_is_refused(refusal, tmp_path):
    model = make_model("VPT deep")
    head = {"head.weight": np.ones((80, 48), np.float32), "head.bias": np.ones(80, np.float32)}
    path = write(tmp_path / "a.npz", random_tensors("VPT deep") | head)
    assert "has shape (48, 80) instead of (48, 7)" in refusal(load_official, model, path)


def test_another_method_is_refused(refusal, tmp_path):
    paths = {name: write(tmp_path / f"{LAYOUTS[name]}.npz", random_tensors(name)) for name in ("VPT deep", "E2VPT")}
    sentence = refusal(load_official, make_model("VPT shallow"), paths["VPT deep"])
    assert sentence == (
        f"{paths['VPT deep']} (vpt_deep layout) does not fit the model: no tensor for prompts/shallow; prompts/deep is "
        "not a parameter of this model"
    )
    sentence = refusal(load_official, make_model("E2VPT", pruning="none"), paths["E2VPT"])
    assert "prompts/segment_mask is not a parameter of this model" in sentence
    assert "no tensor for prompts/key_value" in refusal(load_official, make_model("E2VPT"), paths["VPT deep"])


def test_masks_missing_in_a_file_are_unchanged(tmp_path):
    tensors = {key: x for key, x in random_tensors("E2VPT").items() if "mask_cls_token" not in key}
    model = make_model("E2VPT", 1)
    before = np.asarray(model.prompts.token_mask[...])
    report = load_official(model, write(tmp_path / "a.npz", tensors))
    assert report.missing == ("prompts/segment_mask", "prompts/token_mask")
    np.testing.assert_array_equal(model.prompts.token_mask[...], before)


def test_tensors_that_the_code_does_not_have_are_unknown(refusal, tmp_path):
    tensors = random_tensors("GateVPT") | {"fc_norm.weight": np.ones(48, np.float32)}
    sentence = refusal(load_official, make_model("GateVPT"), write(tmp_path / "a.npz", tensors))
    assert sentence.endswith("does not fit the model: tensor fc_norm.weight is unknown")
    tensors = random_tensors("ML-VPT on MAE") | {"co_fc.W": np.ones((2, 7, 48), np.float32)}
    sentence = refusal(load_official, make_model("ML-VPT on MAE"), write(tmp_path / "b.npz", tensors))
    assert sentence == "tensor co_fc.W of shape (2, 7, 48) does not fit the ml_vpt layout"


def test_a_backbone_is_not_a_whole_model(refusal, tmp_path):
    tensors = {key: x for key, x in random_tensors("GateVPT").items() if not re.match("prompt|gate|temp", key)}
    path = write(tmp_path / "a.npz", tensors)
    assert refusal(load_official, make_model("GateVPT"), path) == (
        f"{path} (timm layout) does not hold a whole model; set config.model.backbone.weights to it if it is a backbone"
    )


def test_a_model_with_rotary_positions_is_not_exported(refusal, tmp_path):
    model = make_model("VPT deep")
    shape = replace(model.backbone.shape, rotary_base=100.0)
    model.backbone = nnx.eval_shape(lambda: ViT(shape, rngs=nnx.Rngs(0)))
    sentence = refusal(export_official, model, tmp_path / "out.npz")
    assert sentence == "the authors' code has no ViT with rotary positions, so there is no layout for this model"
    assert not list(tmp_path.iterdir())


def test_a_model_without_counterpart_is_not_exported(refusal, tmp_path):
    model = make_model("VPT deep")
    model.head = LinearHead(48, 3, pool="both", rngs=nnx.Rngs(0))
    assert refusal(export_official, model, tmp_path / "out.npz") == (
        "no layout of the authors' code has names for all parameters of this model and the same pooling"
    )
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_written_are_refused(refusal, tmp_path):
    sentence = refusal(require_writable, tmp_path / "out.h5")
    assert sentence == "a state dict is written to .safetensors and .npz files, not to 'out.h5'"
    sentence = refusal(require_writable, tmp_path / "no" / "out.npz")
    assert sentence == f"there is no folder {tmp_path / 'no'} to write out.npz into"


# ------------------------------------------------------------------------------------------- tables read both ways
def test_written_names_match_their_patterns():
    rule = Rule(r"blocks\.(?:\d+\.)?(\d+)\.(?:fc1|w12)\.(weight|bias)", r"blocks/\1/mlp/\2")
    assert rule.tensor_name("blocks/11/mlp/gamma") is None
    assert rule.tensor_name("blocks/11/mlp/bias") == "blocks.11.fc1.bias"
    with pytest.raises(ValueError, match="cannot be read backwards"):
        Rule(r"(?:.*\.)?head\..*", "head").tensor_name("head")


def test_cut_is_the_inverse_of_join():
    value = np.arange(24).reshape(4, 6)
    first = Rule("first", "x", index=(0,), axes=(0,), size=1)
    rest = Rule("rest", "x", index=(1,), axes=(0,))
    parts = {rule.pattern: part for rule, part in split_value([rest, first], value)}
    np.testing.assert_array_equal(parts["first"], value[:1])
    np.testing.assert_array_equal(parts["rest"], value[1:])
    thirds = [Rule(name, "x", index=(place,), axes=(-1,)) for place, name in enumerate("abc")]
    expected = [value[:, i : i + 2].tolist() for i in (0, 2, 4)]
    assert [part.tolist() for _, part in split_value(thirds, value)] == expected
    grid = [Rule(rf"(\d)\.{name}", "x", index=(r"\1", place), axes=(0, 1)) for place, name in enumerate("ab")]
    with pytest.raises(ValueError, match="along one axis"):
        split_value(grid, value)
    with pytest.raises(ValueError, match="equal division"):
        split_value([*thirds, replace(thirds[0], index=(3,))], value)


# ------------------------------------------------------------------------------- differences from the authors' code
def test_settings_that_differ_from_the_code_are_reported():
    config = default_config()
    config.model.backbone.name = "vit_b16_in1k"
    use_ml_vpt(config)
    assert departures(config.model, "ml_vpt")[1:] == ["model.prompts.groups is computed instead of published"]
    config.model.prompts.groups = "published"
    assert departures(config.model, "ml_vpt") == ["model.backbone.normalization is auto instead of imagenet"]
    config.model.backbone.normalization = "unit"
    assert departures(config.model, "ml_vpt") == ["model.backbone.normalization is unit instead of imagenet"]
    config.model.backbone.normalization = "imagenet"
    assert departures(config.model, "ml_vpt") == []
    use_ml_vpt(config, preset="paper")
    assert departures(config.model, "ml_vpt_dinov2") == [
        "model.prompts.attention_mask is cross_group instead of all_prompts",
        "model.head.activation is relu instead of gelu",
        "model.head.gate_bias is used instead of unused",
        "model.head.combine is mean_probability instead of mean_logit",
    ]
    config.model.backbone.name = "vit_b16_in21k"
    assert departures(config.model, "vpt_deep") == []
    config.model.prompts.pruning = "fixed"
    assert departures(config.model, "e2vpt") == ["model.prompts.pruned is absent instead of zeroed"]
    config.model.prompts.pruning = "none"
    assert departures(config.model, "e2vpt") == []


@pytest.mark.parametrize(("name", "layout"), [("q2l_resnet101", "q2l"), ("ml_decoder_resnet101", "ml_decoder_resnet")])
def test_settings_of_a_decoder_that_no_tensor_shows_are_reported(name, layout):
    config = load_config(name, [])
    assert departures(config.model, layout) == []
    config.model.head.decoder.update({"heads": 2, "style": "independent"})
    found = departures(config.model, layout)
    assert [line.partition(" is ")[0] for line in found] == ["model.head.decoder.heads", "model.head.decoder.style"]
    assert found[1].endswith(f"is independent instead of {layout.removesuffix('_resnet')}")


def test_q2l_with_self_attention_is_what_flags_of_its_code_compute():
    config = load_config("q2l_resnet101", [])
    config.model.head.decoder.style = "q2l_self_attention"
    assert departures(config.model, "q2l") == []
    config.model.head.decoder.style = "dr_moe"  # the same tensors, but queries and positions enter once
    assert departures(config.model, "q2l") == ["model.head.decoder.style is dr_moe instead of q2l"]


def test_ml_decoder_reads_pixels_without_mean_and_standard_deviation():
    config = load_config("ml_decoder_resnet101:tune=no", [])
    expected = ["model.backbone.normalization is auto instead of unit"]
    assert departures(config.model, "ml_decoder_resnet") == expected
