"""The measurements that train: their configs, the rates that they take, and the results that they gather."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import mlmoe_jax.config as configuration
from benchmarks.measure import digits_methods, photographs, trainings, variants
from mlmoe_jax.data.label_codes import NEGATIVE, POSITIVE
from mlmoe_jax.errors import UserError
from mlmoe_jax.evaluation.results import SplitScores
from mlmoe_jax.runs.folder import RunFolder

FROZEN = photographs.Options(Path("/data"), rates=(1e-3, 1e-2), seeds=(3, 4), epochs=(2, 4))
FINETUNED = replace(FROZEN, part="finetuned")


def two_images(*, right: bool) -> SplitScores:
    """Return a split whose scores of ten equal labels rank its two images rightly or not."""
    scores = np.repeat([[0.9], [0.1]] if right else [[0.1], [0.9]], 10, axis=1).astype(np.float32)
    codes = np.repeat([[POSITIVE], [NEGATIVE]], 10, axis=1).astype(np.int8)
    return SplitScores("held_out", np.array(["a", "b"]), scores, codes)


# ------------------------------------------------------------------------------------------------------- photographs
@pytest.mark.parametrize("options", [FROZEN, FINETUNED], ids=["frozen", "finetuned"])
@pytest.mark.parametrize("method", photographs.METHODS)
def test_all_heads_get_the_same_recipe(options, method):
    config, first = (
        photographs.method_config(name, options, rate=1e-3, epochs=4, seed=3) for name in (method, "linear probe")
    )
    configuration.validate(config)
    for key in ("optim", "augment", "train", "ema", "data", "trainable", "seed"):
        assert config[key] == first[key]
    assert (config.data.cache_features == "float32") == (options is FROZEN)


def test_a_fine_tuned_backbone_has_the_same_rate_with_every_head():
    for rate in (1e-2, 3e-4):
        optim = photographs.method_config("HSQ", FINETUNED, rate=rate, epochs=4, seed=0).optim
        ((pattern, factor),) = optim.rate_rules
        assert re.search(pattern, "backbone/stem/conv/kernel")
        assert optim.learning_rate == rate
        assert factor * rate == pytest.approx(2e-4)


def test_a_linear_path_has_its_own_rate():
    options = replace(FINETUNED, linear_path=1e-2)
    config = photographs.method_config("HSQ", options, rate=1e-3, epochs=4, seed=0)
    (pattern, factor), _ = config.optim.rate_rules
    assert config.model.head.residual == "pooled"
    assert re.search(pattern, "head/pooled/kernel")
    assert factor * config.optim.learning_rate == pytest.approx(1e-2)


def test_rates_of_another_part_replace_the_grid(tmp_path):
    (tmp_path / "frozen.json").write_text('{"HSQ": {"rate": 0.003}}')
    options = replace(FINETUNED, methods=("HSQ",), rates_of=str(tmp_path / "frozen.json"))
    assert photographs.rates_of(options) == {"HSQ": (3e-3,)}
    assert photographs.rates_of(replace(options, rates_of="")) == {"HSQ": (1e-3, 1e-2)}


def test_the_best_rate_and_epochs_on_the_held_out_images_are_trained_on_all_images(tmp_path, monkeypatch):
    """The scores of the stand-in rank all pairs but one wrongly, which has 4 epochs and a rate of 0.01."""
    tuned, trained = [], []

    def run(config, folder):
        (tuned if folder.name.startswith("tune-") else trained).append(config)
        RunFolder(folder).write_json("results.json", {"val": {"metrics": {photographs.GAPS[0]: 0.5}}})
        RunFolder(folder).write_json(trainings.TIMES, {"cpu_seconds": 7.0})
        best = (config.train.epochs, config.optim.learning_rate) == (4, 1e-2)
        return dict.fromkeys((trainings.HELD_OUT, "val"), two_images(right=best))

    monkeypatch.setattr(trainings, "run", run)
    monkeypatch.setattr(photographs, "StoredRun", lambda folder: SimpleNamespace(labels=["cat", "dog"]))
    found = photographs.compare("HSQ", FROZEN.rates, replace(FROZEN, out=tmp_path), np.arange(1))
    assert (found["rate"], found["epochs"], found["mAP"], found["classes"]) == (1e-2, 4, [1.0, 1.0], ["cat"])
    assert found["cpu_seconds"] == [7.0, 7.0]
    assert found["tuning"] == {
        "rate=0.001,epochs=2": 0.5,
        "rate=0.001,epochs=4": 0.5,
        "rate=0.01,epochs=2": 0.5,
        "rate=0.01,epochs=4": 1.0,
    }
    for config in tuned:
        assert (config.data.val_split, config.data.val_fraction, config.seed) == ("held_out", 0.2, 3)
        assert tuple(config.data.test_splits) == ("held_out",)
    found = [(config.data.val_split, config.optim.learning_rate, config.seed) for config in trained]
    assert found == [("", 1e-2, 3), ("", 1e-2, 4)]
    assert photographs.compare("HSQ", (3e-3,), replace(FROZEN, epochs=(2,), out=tmp_path), np.arange(1))["tuning"] == {}


# ---------------------------------------------------------------------------------------------------------- variants
@pytest.mark.parametrize(
    ("comparison", "data", "known", "cached", "section"),
    [
        ("losses", "digits", "random:0.4", True, "loss"),
        ("losses", "photographs", "one", True, "loss"),
        ("mixing", "digits", "all", False, "augment"),
        ("mixing", "photographs", "all", False, "augment"),
        ("mixing", "photographs", "all", True, "augment"),
    ],
)
def test_variants_differ_only_in_the_section_that_is_compared(comparison, data, known, cached, section):
    settings, for_features, _ = variants.COMPARISONS[comparison]
    options = variants.Options(comparison, data, known, Path("/data"), "linear_probe:dataset=digits", cached)
    names = for_features if cached else settings
    configs = [variants.variant_config(name, options, rate=1e-3, seed=3) for name in names]
    for config in configs:
        config.loss.expected_positives = 2.0
        configuration.validate(config)
        assert config.data.known_positives == known
        for key in {"optim", "train", "augment", "data", "seed", "trainable", "loss"} - {section}:
            assert config[key] == configs[0][key]
    assert len({str(config[section]) for config in configs}) == len(configs)


def test_the_rate_of_large_losses_reaches_the_share_of_hidden_positives():
    flags = ("losses", "digits", "random:0.4", Path(), "linear_probe:dataset=digits", True)
    options = variants.Options(*flags, epochs=11)
    assert options.path == Path("runs/variants/losses-digits-random-0.4-cached")
    config = variants.variant_config("LL-Cp", options, rate=1e-3, seed=3)
    variants.add_label_counts(config)
    settings = config.loss
    np.testing.assert_allclose(settings.large_loss_rate * 10, 0.6 * settings.expected_positives / 10, rtol=1e-3)


# ------------------------------------------------------------------------------------------------------------ digits
def test_each_training_on_digits_has_its_own_folder_and_a_valid_config(tmp_path):
    options = digits_methods.Options(3, out=tmp_path)
    runs = [digits_methods.training(method, 5e-3, 1, options) for method in digits_methods.METHODS]
    assert len({folder for _, folder in runs}) == len(digits_methods.METHODS)
    for config, _ in runs:
        configuration.validate(config)
        found = (config.data.name, config.train.epochs, config.optim.learning_rate, config.seed)
        assert found == ("digits", 3, 5e-3, 1)


def test_two_runs_isolate_the_number_of_parameters_and_the_gates_of_labels():
    wide = digits_methods.method_config("gvpt:per_group=12", 4).model
    group_gates, ml_vpt = (
        digits_methods.method_config(f"mlvpt_digits{flag}", 4) for flag in (" --config.model.head.gates_of=group", "")
    )
    assert (wide.prompts.per_group, wide.prompts.sides) == (12, "both")
    assert group_gates.model.head.gates_of == "group"
    group_gates.model.head.gates_of = "label"
    assert group_gates == ml_vpt


@pytest.fixture
def trained(monkeypatch):
    """The trainings by a stand-in, in which VPT diverges at a rate of 0.1, and other scores are right below it."""
    asked = []

    def run(config, folder):
        rate = config.optim.learning_rate
        asked.append((rate, config.seed))
        if rate == 0.1:
            raise UserError("the loss is not finite")
        metrics = {split: {"mAP": rate + config.seed} for split in digits_methods.SPLITS}
        RunFolder(folder).write_json("results.json", metrics)
        RunFolder(folder).write_json(trainings.TIMES, {"cpu_seconds": 7.0})
        return dict.fromkeys(metrics, two_images(right=rate == 0.01))

    monkeypatch.setattr(trainings, "run", run)
    monkeypatch.setattr(
        digits_methods, "StoredRun", lambda folder: SimpleNamespace(final_metrics=folder.read_json("results.json"))
    )
    return asked


def test_the_best_rate_that_does_not_diverge_is_trained_with_all_seeds(trained, tmp_path):
    options = digits_methods.Options(4, (0.001, 0.01, 0.1), (3, 4), tmp_path)
    found = digits_methods.compare("vpt", options)
    assert trained == [(0.001, 3), (0.01, 3), (0.1, 3), (0.01, 3), (0.01, 4)]
    assert found == {
        "rate": 0.01,
        "tuning": {"0.001": 0.5, "0.01": 1.0},
        **{split: [3.01, 4.01] for split in digits_methods.SPLITS},
    }
    with pytest.raises(UserError, match="all trainings have failed"):
        digits_methods.compare("vpt", replace(options, rates=(0.1, 0.1)))


@pytest.mark.parametrize(("epochs", "kept"), [(4, True), (5, False)])
def test_methods_with_results_of_the_same_options_are_not_trained_again(epochs, kept, tmp_path, monkeypatch):
    monkeypatch.setattr(digits_methods, "RESULTS", tmp_path / "results.json")
    stored = {"epochs": epochs, "rates": [0.01, 0.1], "seeds": [3, 4], "methods": {"vpt": {"test": [0.9]}, "old": {}}}
    digits_methods.RESULTS.write_text(json.dumps(stored))
    found = digits_methods.stored_results(digits_methods.Options(4, (0.01, 0.1), (3, 4)))
    assert found == ({"vpt": {"test": [0.9]}} if kept else {})


def test_the_tables_have_the_means_and_sample_deviations(monkeypatch):
    rng, methods = np.random.default_rng(0), {}
    for name in ("vpt", "gvpt", "mlvpt_digits", "linear_probe"):
        scores = {split: rng.uniform(0.8, 0.9, 3).tolist() for split in digits_methods.SPLITS}
        counts = {"trainable": 12_810, "macs": 73_440_000}
        methods[name] = {"rate": 0.005, **counts, **scores}
    methods["vpt"] |= {"test": [0.90, 0.91, 0.92], "test_shift": [0.80, 0.81, 0.85]}
    methods["linear_probe"]["val"] = [0.5, 0.5, 0.53]
    outcome = {"epochs": 4, "rates": [0.001, 0.005], "seeds": [0, 1, 2], "methods": methods}
    monkeypatch.setattr(digits_methods, "PAIRS", (("vpt", "gvpt"),))
    monkeypatch.setattr(digits_methods, "IN_README", {"linear_probe": "linear probe"})
    text = digits_methods.tables(outcome)
    assert "4 epochs" in text
    assert "for seed 0, of 0.001, 0.005." in text
    assert "| `vpt` | 12,810 | 73.4 | 91.00 ± 1.00 | 82.00 ± 2.65 | 9.00 ± 1.73 |" in text
    assert "| `gvpt` − `vpt` | " in text
    assert "| linear probe | 12,810 | 51.00 ± 1.73 | " in digits_methods.table_of_readme(outcome)
    assert digits_methods.difference(np.array([0.932]), np.array([0.91])) == "−2.20"
