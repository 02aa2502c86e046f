"""`python -m benchmarks.missing_labels`: its configs and its table."""

import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.paths import REPOSITORY

import mlmoe_jax.config as configuration

sys.path.insert(0, str(REPOSITORY))

from benchmarks import missing_labels


def benchmark(data: str, known: str) -> missing_labels.Benchmark:
    config, cached = "linear_probe:dataset=digits", data == "digits"
    return missing_labels.Benchmark(data, known, "/data", config, cached, Path("out"), (1e-3,), (3,), 11)


@pytest.mark.parametrize(("data", "known"), [("digits", "random:0.4"), ("photographs", "one")])
def test_losses_differ_only_in_their_keys(data, known):
    configs = [
        missing_labels.loss_config(loss, benchmark(data, known), rate=1e-3, seed=3) for loss in missing_labels.LOSSES
    ]
    for config in configs:
        config.loss.expected_positives = 2.0
        configuration.validate(config)
        assert config.data.known_positives == known
        for key in ("optim", "train", "augment", "data", "seed", "trainable"):
            assert config[key] == configs[0][key]


@pytest.mark.slow
def test_the_rate_of_large_losses_reaches_the_share_of_hidden_positives():
    for loss, steps in (("LL-Ct", 10), ("LL-Cp", 1)):
        config = missing_labels.loss_config(loss, benchmark("digits", "random:0.4"), rate=1e-3, seed=3)
        settings = missing_labels.with_label_counts(config).loss
        np.testing.assert_allclose(settings.large_loss_rate * steps, 0.6 * settings.expected_positives / 10, rtol=1e-3)


def test_differences_in_the_table_are_paired():
    one = {"rate": 0.01, "mAP": [0.5, 0.6], "resampled_mAP": [0.5, 0.6], "cpu_seconds": [5.0]}
    other = {"rate": 0.001, "mAP": [0.6, 0.7], "resampled_mAP": [0.6, 0.7], "cpu_seconds": [7.0]}
    heading, _, first, second = missing_labels.table({"BCE": one, "ROLE": other}).splitlines()
    assert heading == "| loss | rate | mAP | − BCE | CPU s |"
    assert first == "| BCE | 0.01 | 55.00 ± 7.07 |  | 5 |"
    assert second == "| ROLE | 0.001 | 65.00 ± 7.07 | +10.00 [+10.00, +10.00] | 7 |"
