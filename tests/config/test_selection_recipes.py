"""What the configs of the methods select on: as published, or on held-out training images."""

import pytest
from helpers.documents import CONFIGS
from helpers.name_vectors import drawn_vectors

from mlmoe_jax.config import flatten, load_config, validate
from mlmoe_jax.training.optim import make_schedules
from mlmoe_jax.training.selection import require_metric, selection_split

# config -> the evaluator and the metric of its paper
PUBLISHED = {
    **dict.fromkeys(("linear_probe", "finetune", "vpt", "gatevpt", "e2vpt", "gvpt"), ("mlvpt", "mAP_envelope")),
    **dict.fromkeys(("lora", "dora", "bitfit", "ssf", "adaptformer"), ("mlvpt", "mAP_envelope")),
    **dict.fromkeys(
        ("mlvpt_dinov2", "mlvpt_dinov3", "mlvpt_vit", "mlmoe_dinov2", "mlmoe_dinov3"), ("mlvpt", "mAP_envelope")
    ),
    "q2l_resnet101": ("q2l", "mAP_envelope"),
    "ml_decoder_resnet101": ("asl", "mAP"),
    "mlgcn_resnet101": ("mlgcn", "mAP"),
    "addgcn_resnet101": ("mlgcn", "mAP"),
    "cnn_rnn_resnet101": ("drmoe", "mAP"),
    "csra_resnet101": ("mlgcn", "mAP"),
    "splicemix_resnet101": ("mlgcn", "mAP"),
    "pat_resnet101": ("mlvpt", "mAP_envelope"),
    "hsq_resnet101": ("drmoe", "mAP"),
    "drmoe_resnet101": ("drmoe", "mAP"),
    "drmoe_20k": ("none", "mAP"),  # no row of a table
}
WITHOUT_A_PAPER = {"own_csv", "pretrain_digits"}
BENCHMARKS = ("voc2007", "voc2012", "coco2014", "nuswide", "vg256")
HELD_OUT = {
    "data.join_twins": False,
    "data.val_split": "held_out",
    "data.val_fraction": 0.1,
    "eval.select_on": "val",
    "thresholds.at_end": True,
}


def changes(reference: str, of: str) -> dict:
    """Return the keys of a config that differ from another one, with their values."""
    now, before = (flatten(load_config(name, [])) for name in (reference, of))
    return {key: value for key, value in now.items() if value != before[key]}


def test_every_config_is_listed():
    assert {path.stem for path in CONFIGS} == {*PUBLISHED, "mlvpt_digits"} | WITHOUT_A_PAPER


@pytest.mark.parametrize("name", PUBLISHED)
def test_benchmarks_select_as_published_and_print_the_row_of_the_paper(name):
    for dataset in BENCHMARKS:
        config = load_config(f"{name}:dataset={dataset}", [])
        validate(config)
        require_metric(config)
        assert (config.metrics.preset, config.eval.select_metric) == PUBLISHED[name]
        assert selection_split(config) == config.data.test_splits[0]
        assert config.data.exif == "ignore", "no published code rotates images"
        assert not config.thresholds.at_end


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_recipe_takes_a_table_of_ones_own(name):
    """With the options of own_csv alone. A rise of two epochs of COCO would be longer than the training."""
    config = load_config(f"{name}:dataset=own,root=photos", [])
    validate(config)
    require_metric(config)
    assert (config.data.name, config.data.root, config.data.table) == ("csv", "photos", "labels.csv")
    assert (selection_split(config), config.data.val_fraction, config.data.test_splits) == ("val", 0.1, ())
    assert config.data.bad_images == "skip"
    make_schedules(config.optim, 5 * config.train.epochs)


def test_what_a_data_set_of_a_recipe_does_not_read_is_refused(refusal):
    for name in ("csv", "folders", "tfds:coco/2014"):
        told = refusal(load_config, f"csra_resnet101:dataset={name}", [])
        assert told.endswith(f"; dataset=own with --config.data.name={name} reads it")
    assert "did you mean 'own'?" in refusal(load_config, "vpt:dataset=owm", [])
    assert refusal(load_config, "vpt:dataset=voc2007,table=a.csv", []) == (
        "table is for dataset=own and has no effect on dataset=voc2007; leave it out"
    )
    assert "label_column is for dataset=own" in refusal(load_config, "vpt:dataset=digits,label_column=", [])


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_preset_held_out_changes_the_selection_and_nothing_else(name):
    usual, held_out = f"{name}:dataset=vg256", f"{name}:dataset=vg256,preset=held_out"
    config = load_config(held_out, [])
    validate(config)
    assert changes(held_out, of=usual) == HELD_OUT
    assert selection_split(config) not in (config.data.train_split, *config.data.test_splits)
    assert not changes(f"{usual},selection=held_out", of=held_out)


@pytest.mark.parametrize("name", [*(f"{name}:dataset=digits," for name in PUBLISHED), "mlvpt_digits:"])
def test_a_data_set_with_validation_images_keeps_them(name, refusal):
    assert "contradicts selection=published" in refusal(load_config, f"{name}preset=held_out,selection=published", [])
    assert changes(f"{name}preset=held_out", of=name) == {"thresholds.at_end": True}
    config = load_config(f"{name}preset=held_out", [])
    validate(config)
    assert selection_split(config) == "val"
    assert (config.metrics.preset, config.eval.select_metric) == ("none", "mAP")


@pytest.mark.parametrize("preset", ["mlvpt_dinov2:preset=paper", "drmoe_resnet101:preset=static"])
def test_held_out_selection_combines_with_every_preset(preset):
    assert changes(f"{preset},selection=held_out", of=preset) == HELD_OUT


def test_own_images_with_names_have_their_backbone_and_a_fit_of_its_normalized_features(tmp_path, monkeypatch):
    drawn_vectors(("sea", "boat"), 8, backbone="siglip2_vitb16_256").write(tmp_path / "labels.safetensors")
    monkeypatch.chdir(tmp_path)
    config = load_config("own_csv:root=photos,names=labels.safetensors", [])
    validate(config)
    assert (config.model.backbone.name, config.data.image_size) == ("siglip2_vitb16_256", 256)
    assert (config.model.head.kind, config.train.fit, config.model.prompts.kind) == ("cosine", "logistic", "none")
    assert config.model.head.names == "labels.safetensors"
    assert config.data.classes == str(tmp_path / "labels.safetensors"), "the table is in another folder"
    assert load_config("own_csv:root=photos,names=labels.safetensors,resolution=384", []).data.image_size == 384
    assert load_config("own_csv:root=photos", []).data.image_size == 224


def test_own_images_with_names_are_prepared_as_their_backbone_was_published(tmp_path):
    drawn_vectors(("sea", "boat"), 8, backbone="clip_vitl14_336").write(file := tmp_path / "labels.safetensors")
    data = load_config(f"own_csv:root=photos,names={file}", []).data
    assert (data.image_size, data.resize) == (336, "clip")
    assert load_config("own_csv:root=photos,backbone=clip_vitb16", []).data.resize == "square"
