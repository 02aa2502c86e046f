"""`python -m benchmarks.photographs`: the configs that it compares, the rates that it takes, and its table."""

import dataclasses
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import mlmoe_jax.config as configuration
from benchmarks import photographs
from mlmoe_jax.data.label_codes import NEGATIVE, POSITIVE
from mlmoe_jax.evaluation.results import SplitScores


def benchmark(part: str, **rates_of: float) -> photographs.Benchmark:
    return photographs.Benchmark("/data", part, Path("out"), (1e-3, 1e-2), (3, 4), (4,), rates_of, 2e-4)


@pytest.mark.parametrize("part", ["frozen", "finetuned"])
@pytest.mark.parametrize("method", photographs.METHODS)
def test_all_heads_get_the_same_recipe(part, method):
    config, first = (
        photographs.method_config(name, benchmark(part), rate=1e-3, epochs=4, seed=3)
        for name in (method, "linear probe")
    )
    configuration.validate(config)
    for key in ("optim", "augment", "train", "ema", "data", "trainable", "seed"):
        assert config[key] == first[key]
    assert (config.data.cache_features == "float32") == (part == "frozen")


def test_a_fine_tuned_backbone_has_the_same_rate_with_every_head():
    for rate in (1e-2, 3e-4):
        optim = photographs.method_config("HSQ", benchmark("finetuned"), rate=rate, epochs=4, seed=0).optim
        ((pattern, factor),) = optim.rate_rules
        assert re.search(pattern, "backbone/stem/conv/kernel")
        assert optim.learning_rate == rate
        assert factor * rate == pytest.approx(2e-4)


def test_a_linear_path_has_its_own_rate():
    flags = dataclasses.replace(benchmark("finetuned"), linear_path=1e-2)
    config = photographs.method_config("HSQ", flags, rate=1e-3, epochs=4, seed=0)
    (pattern, factor), _ = config.optim.rate_rules
    assert config.model.head.residual == "pooled"
    assert re.search(pattern, "head/pooled/kernel")
    assert factor * config.optim.learning_rate == pytest.approx(1e-2)


def test_rates_of_another_part_are_not_tuned_again(tmp_path):
    given = benchmark("finetuned", HSQ=3e-3)
    assert photographs.tuned("HSQ", given, tmp_path, np.arange(2)) == (3e-3, 4, {})
    assert not list(tmp_path.iterdir())


def test_the_best_rate_and_epochs_on_the_held_out_images_are_taken(tmp_path, monkeypatch):
    """The scores of the stand-in rank all pairs but one wrongly, which has 4 epochs and a rate of 0.01."""
    configs = []

    def run(config, folder):
        configs.append(config)
        assert folder.parent == tmp_path
        best = (config.train.epochs, config.optim.learning_rate) == (4, 1e-2)
        scores = np.array([[0.9], [0.1]] if best else [[0.1], [0.9]], np.float32)
        return SplitScores("held_out", np.array(["a", "b"]), scores, np.array([[POSITIVE], [NEGATIVE]], np.int8))

    monkeypatch.setattr(photographs, "run", run)
    flags = dataclasses.replace(benchmark("frozen"), epochs=(2, 4))
    rate, epochs, tuning = photographs.tuned("HSQ", flags, tmp_path, np.arange(1))
    assert (rate, epochs) == (1e-2, 4)
    assert tuning == {
        "rate=0.001,epochs=2": 0.5,
        "rate=0.001,epochs=4": 0.5,
        "rate=0.01,epochs=2": 0.5,
        "rate=0.01,epochs=4": 1.0,
    }
    for config in configs:
        assert (config.data.val_split, config.data.val_fraction, config.seed) == ("held_out", 0.2, 3)
        assert tuple(config.data.test_splits) == ("held_out",)


def test_a_table_without_the_rate_of_a_method_is_refused(tmp_path, monkeypatch, capsys):
    rates = tmp_path / "frozen.json"
    rates.write_text('{"linear probe": {"rate": 0.01}}')
    flags = ["--root=/data", "--methods=linear probe;HSQ", f"--rates-of={rates}"]
    monkeypatch.setattr(sys, "argv", ["photographs", *flags])
    with pytest.raises(SystemExit):
        photographs.main()
    assert f"--rates-of: {rates} has no 'HSQ'" in capsys.readouterr().err


def test_differences_in_the_table_are_to_the_first_method():
    names = (*photographs.METRICS, *photographs.GAPS)
    found = {
        "probe": {
            "rate": 0.01,
            "epochs": 10,
            "cpu_seconds": [5.0, 7.0],
            "resampled_mAP": [0.5, 0.6],
            **{key: [0.5, 0.6] for key in names},
        },
        "HSQ": {
            "rate": 3e-4,
            "epochs": 20,
            "cpu_seconds": [50.0],
            "resampled_mAP": [0.4, 0.5],
            **{key: [0.45] for key in names},
        },
    }
    heading, _, probe, hsq = photographs.table(found).splitlines()
    assert "− probe" in heading
    assert probe.startswith("| probe | 0.01 | 10 | 55.00 ± 7.07 |  | 55.00 ± 7.07 |")
    assert probe.endswith("| 6 |")
    assert hsq.startswith("| HSQ | 0.0003 | 20 | 45.00 | -10.00 [-10.00, -10.00] | 45.00 |")
