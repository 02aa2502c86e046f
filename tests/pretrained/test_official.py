"""Import and export of checkpoints of the authors' code, and the outputs of the imported models."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.official_models import LAYOUTS, columns_first, family, listed, make_model, random_tensors
from helpers.paths import PARITY
from helpers.tensor_files import assert_equal, renamed, values_of, write
from helpers.twins import error
from safetensors.numpy import load_file

from mlmoe_jax.config import load_config
from mlmoe_jax.errors import UserError
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.pretrained.load import LoadReport
from mlmoe_jax.pretrained.official import (
    departures,
    export_official,
    load_official,
    official_tensors,
    split_value,
)
from mlmoe_jax.pretrained.rules.base import Rule

TOLERANCE = 2e-5


def assert_complete(report: LoadReport):
    assert report.unused == report.missing == ()


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
    assert_complete(report)
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
    assert_complete(report)
    assert set(report.loaded) == set(values_of(source))
    assert_equal(target, values_of(source))


def test_gate_vpt_on_moco_v3_is_known_by_its_positions(tmp_path):
    tensors = columns_first(family.state_dict("gate_vpt_mae"))
    load_official(make_model("gate_vpt"), write(tmp_path / "moco.npz", tensors))


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
    assert source.name == "vpt_shallow"
    assert not any("prompt" in key for key in tensors)


# The layouts of the family that is stored, and prefixes of names in the files of others.
FAMILY = {name: name for name in family.CASES if not name.startswith("e2vpt")}
FAMILY |= {"vpt_deep_projected": "vpt_deep", "vpt_deep_timm": "vpt_deep"}
FAMILY |= dict.fromkeys(("gate_vpt", "gate_vpt_mae"), "vpt_shallow_timm")
WRAPPED = {"VPT deep": "model.", "VPT shallow": "module.", "GateVPT": "", "ML-VPT on MAE": "model.module."}


@pytest.mark.parametrize("name", [*WRAPPED, *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILY)])
def test_what_was_imported_from_any_wrapper_is_exported(tmp_path, name):
    tensors, model = family.state_dict(name) if name in FAMILY else random_tensors(name), make_model(name)
    named = tensors
    if name in WRAPPED:
        encoder = () if name.startswith("ML-VPT") else (("^", "enc."), (r"^enc\.head\.", "head.last_layer."))
        named = renamed(tensors, *encoder, ("^", WRAPPED[name]))
    assert_complete(load_official(model, write(tmp_path / "weights.safetensors", named)))
    layout, out = official_tensors(model)
    assert layout.name == (FAMILY | LAYOUTS)[name]
    # the class of a ViT cannot be recognized from deep prompts, and the supervised class is the first
    if not name.endswith("_timm"):
        assert {key: x.tobytes() for key, x in out.items()} == {key: x.tobytes() for key, x in tensors.items()}


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


def test_a_refused_file_leaves_the_position_table(tmp_path):
    name = "ML-VPT on MAE"
    tensors, model = random_tensors(name), make_model(name)
    tensors["img_encoder.pos_embed"] = np.zeros((1, 1 + 36, 48), np.float32)
    del tensors["img_encoder.norm.bias"]
    before = values_of(model)
    with pytest.raises(UserError, match="no tensor for backbone/norm/bias"):
        load_official(model, write(tmp_path / "weights.npz", tensors))
    assert_equal(model, before)


def test_masks_missing_in_a_file_are_unchanged(tmp_path):
    whole, model = random_tensors("E2VPT"), make_model("E2VPT", 1)
    tensors = {key: x for key, x in whole.items() if "mask_cls_token" not in key}
    before = np.asarray(model.prompts.token_mask[...])
    report = load_official(model, write(tmp_path / "a.npz", tensors))
    assert report.missing == ("prompts/segment_mask", "prompts/token_mask")
    np.testing.assert_array_equal(model.prompts.token_mask[...], before)
    assert_complete(load_official(model, write(tmp_path / "b.npz", whole)))


# ------------------------------------------------------------------------------------------- tables read both ways
def test_written_names_match_their_patterns():
    rule = Rule(r"blocks\.(?:\d+\.)?(\d+)\.(?:fc1|w12)\.(weight|bias)", r"blocks/\1/mlp/\2")
    assert rule.tensor_name("blocks/11/mlp/gamma") is None
    assert rule.tensor_name("blocks/11/mlp/bias") == "blocks.11.fc1.bias"
    with pytest.raises(ValueError, match="cannot be read backwards"):
        Rule(r"(?:.*\.)?head\..*", "head").tensor_name("head")


def test_a_value_is_split_along_one_axis_into_equal_parts():
    thirds = [Rule(name, "x", index=(place,), axes=(-1,)) for place, name in enumerate("abc")]
    grid = [Rule(rf"(\d)\.{name}", "x", index=(r"\1", place), axes=(0, 1)) for place, name in enumerate("ab")]
    for rules, says in ((grid, "along one axis"), ([*thirds, replace(thirds[0], index=(3,))], "equal division")):
        with pytest.raises(ValueError, match=says):
            split_value(rules, np.zeros((4, 6)))


# ------------------------------------------------------------------------------- differences from the authors' code
OF_PAPER = (
    "prompts.attention_mask is cross_group instead of all_prompts",
    "head.activation is relu instead of gelu",
    "head.gate_bias is used instead of unused",
    "head.combine is mean_probability instead of mean_logit",
)
# (config, layout, changed keys, differences)
DEPARTURES = [
    ("mlvpt_vit:backbone=in1k", "ml_vpt", {}, ()),
    *(
        ("mlvpt_vit:backbone=in1k", "ml_vpt", {key: value}, (f"{key} is {value} instead of {published}",))
        for key, value, published in (
            ("backbone.normalization", "auto", "imagenet"),
            ("backbone.normalization", "unit", "imagenet"),
            ("prompts.groups", "computed", "published"),
        )
    ),
    ("mlvpt_dinov2:preset=paper", "ml_vpt_dinov2", {}, OF_PAPER),
    ("vpt:backbone=vit_b16_in21k", "vpt_deep", {}, ()),
    ("e2vpt", "vpt_deep", {"prompts.pruning": "fixed"}, ("prompts.pruned is absent instead of zeroed",)),
    ("e2vpt", "vpt_deep", {"prompts.pruning": "none"}, ()),
    ("q2l_resnet101", "q2l", {"head.decoder.style": "q2l_self_attention"}, ()),  # its tensors show it
    # the same tensors, but queries and positions enter once
    ("q2l_resnet101", "q2l", {"head.decoder.style": "dr_moe"}, ("head.decoder.style is dr_moe instead of q2l",)),
    *(
        (f"{style}_resnet101", layout, {f"head.decoder.{key}": value}, differences)
        for style, layout, heads in (("q2l", "q2l", 4), ("ml_decoder", "ml_decoder_resnet", 8))
        for key, value, differences in (
            ("heads", str(heads), ()),
            ("heads", "2", (f"head.decoder.heads is 2 instead of {heads}",)),
            ("style", "independent", (f"head.decoder.style is independent instead of {style}",)),
        )
    ),
    # ML-Decoder reads pixels without mean and standard deviation
    (
        "ml_decoder_resnet101:tune=no",
        "ml_decoder_resnet",
        {},
        ("backbone.normalization is auto instead of unit",),
    ),
]


@pytest.mark.parametrize(("reference", "layout", "changes", "expected"), DEPARTURES)
def test_settings_that_differ_from_the_code_are_reported(reference, layout, changes, expected):
    config = load_config(reference, [(f"model.{key}", value) for key, value in changes.items()])
    assert departures(config.model, layout) == [f"model.{line}" for line in expected]
