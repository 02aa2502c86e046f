"""Images of one's own: the backbone that `configs/own_csv.py` chooses."""

import pytest
from helpers.paths import REPOSITORY

from mlmoe_jax.config import flatten, load_config, validate
from mlmoe_jax.models.backbones.catalog import CATALOG

CONFIG = str(REPOSITORY / "configs" / "own_csv.py")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("MLMOE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def fetch_nothing_but(cache, name: str) -> None:
    path = cache / CATALOG[name].weights.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"as if it had been downloaded")


LOGISTIC = {"train.fit": "logistic", "data.val_fraction": 0, "data.val_split": "", "data.cache_features": "float32"}
STEPS = {"train.fit": "steps", "data.val_fraction": 0.1, "data.val_split": "val", "eval.select_on": "val"}
INSTALLED = {"model.backbone.name": "efficientnet_lite0", "model.backbone.normalization": "auto"}
TUNED = {
    "trainable": (("", True),),
    "model.prompts.kind": "none",
    "model.head.kind": "linear",
    "loss.kind": "bce",
    "data.cache_features": "no",
    "augment.geometry": "random_resized_crop",
    "augment.flip": True,
    "train.patience": 0,
}
FETCHED = STEPS | {"model.prompts.kind": "group", "data.cache_features": "no", "train.epochs": 20}
SAID = "backbone: {}, whose weights are on this machine"


@pytest.mark.parametrize(
    ("there", "arguments", "values", "said"),
    [
        (
            [],
            "",
            INSTALLED | LOGISTIC | {"model.head.kind": "linear", "thresholds.at_end": True},
            "backbone: efficientnet_lite0, which is installed; a better one, which is downloaded once, is "
            ":backbone=dinov2_vits14\n",
        ),
        (["dinov2_vits14"], "", {"model.backbone.name": "dinov2_vits14"} | FETCHED, SAID.format("dinov2_vits14")),
        (
            ["dinov2_vits14", "dinov2_vitb14"],
            "",
            {"model.backbone.name": "dinov2_vitb14"} | FETCHED,
            SAID.format("dinov2_vitb14"),
        ),
        ([], ":backbone=resnet50", {"model.backbone.name": "resnet50", "model.prompts.kind": "none"}, ""),
        ([], ":backbone=resnet50,fit=steps", STEPS | {"train.epochs": 20}, ""),
        ([], ":backbone=resnet50,fit=steps,epochs=3", STEPS | {"train.epochs": 3}, ""),
        (
            [],
            ":backbone=resnet50,tune=yes",
            STEPS
            | TUNED
            | {
                "model.backbone.batch_norm": "running",
                "optim.rate_rules": (("^backbone/", 0.1), ("^head/pooled/", 1.0)),
            },
            "",
        ),
        (
            [],
            ":backbone=dinov2_vits14,tune=yes,epochs=3",
            STEPS | TUNED | {"train.epochs": 3, "optim.rate_rules": (("^backbone/", 0.003), ("^head/pooled/", 1.0))},
            "",
        ),
        ([], ":epochs=3", LOGISTIC, "epochs has no effect on a fit to convergence; fit=steps trains by steps"),
    ],
)
def test_the_backbone_and_the_fit_follow_what_is_there_and_asked_for(cache, capsys, there, arguments, values, said):
    for name in there:
        fetch_nothing_but(cache, name)
    config = load_config(f"{CONFIG}{arguments}", [])
    validate(config)
    assert values.items() <= flatten(config).items()
    shown = capsys.readouterr().err
    assert said in shown
    assert bool(said) == bool(shown)


def test_a_trained_backbone_has_no_vectors_of_names(refusal):
    assert "leave one of them out" in refusal(load_config, f"{CONFIG}:tune=yes,names=labels.safetensors", [])


def test_a_run_keeps_its_backbone(cache):
    started = load_config(CONFIG, [])
    fetch_nothing_but(cache, "dinov2_vits14")
    resumed, new = load_config(CONFIG, [], run=lambda: started), load_config(CONFIG, [])
    assert [config.model.backbone.name for config in (resumed, new)] == ["efficientnet_lite0", "dinov2_vits14"]
