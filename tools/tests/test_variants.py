"""`python -m benchmarks.variants`: its configs and its table."""

from pathlib import Path

import numpy as np
import pytest

import mlmoe_jax.config as configuration
from benchmarks import variants


def benchmark(comparison: str, data: str, known: str, *, cached: bool) -> variants.Benchmark:
    flags = (comparison, data, known, "/data", "linear_probe:dataset=digits", cached)
    return variants.Benchmark(*flags, Path("out"), (1e-3,), (3,), 11)


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
    flags = benchmark(comparison, data, known, cached=cached)
    configs = [
        variants.variant_config(name, flags, rate=1e-3, seed=3) for name in (for_features if cached else settings)
    ]
    for config in configs:
        config.loss.expected_positives = 2.0
        configuration.validate(config)
        assert config.data.known_positives == known
        for key in {"optim", "train", "augment", "data", "seed", "trainable", "loss"} - {section}:
            assert config[key] == configs[0][key]
    assert len({str(config[section]) for config in configs}) == len(configs)


def test_the_rate_of_large_losses_reaches_the_share_of_hidden_positives():
    flags = benchmark("losses", "digits", "random:0.4", cached=True)
    assert flags.name == "losses-digits-random-0.4-cached"
    config = variants.variant_config("LL-Cp", flags, rate=1e-3, seed=3)
    settings = variants.with_label_counts(config).loss
    np.testing.assert_allclose(settings.large_loss_rate * 10, 0.6 * settings.expected_positives / 10, rtol=1e-3)


def test_differences_in_the_table_are_paired():
    one = {"rate": 0.01, "mAP": [0.5, 0.6], "resampled_mAP": [0.5, 0.6], "cpu_seconds": [5.0]}
    other = {"rate": 0.001, "mAP": [0.6, 0.7], "resampled_mAP": [0.6, 0.7], "cpu_seconds": [7.0]}
    heading, _, first, second = variants.table({"BCE": one, "ROLE": other}, ("BCE", "ASL")).splitlines()
    assert heading == "| variant | rate | mAP | − BCE | CPU s |"
    assert first == "| BCE | 0.01 | 55.00 ± 7.07 |  | 5 |"
    assert second == "| ROLE | 0.001 | 65.00 ± 7.07 | +10.00 [+10.00, +10.00] | 7 |"
