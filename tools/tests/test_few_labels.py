"""`python -m benchmarks.measure few_labels`, on drawn features."""

import numpy as np

from benchmarks.measure import few_labels
from benchmarks.measure.few_labels import Options
from benchmarks.measure.label_selection import Images
from mlmoe_jax.data.label_codes import POSITIVE
from mlmoe_jax.training.logistic.penalty_search import Origin

COLUMNS = np.arange(3)


def images(count: int, seed: int) -> Images:
    """Images with three labels that their features determine."""
    features = np.random.default_rng(seed).normal(size=(count, 8)).astype(np.float32)
    return Images(features, (features[:, :3] > 0.5).astype(np.int8))


def test_few_images_have_each_label_as_often_as_they_should():
    codes = images(200, 0).codes
    rows = few_labels.few_of_each(codes, COLUMNS, 4, np.random.default_rng(0))
    assert len(set(rows.tolist())) == len(rows) <= 12
    assert ((codes[rows] == POSITIVE).sum(axis=0) >= 4).all()
    assert len(few_labels.few_of_each(codes, COLUMNS[:1], 10**6, np.random.default_rng(0))) == codes[:, 0].sum()


def test_noise_has_the_norm_of_the_weights_times_a_factor():
    origin = Origin(np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32), np.zeros(3, np.float32))
    added = few_labels.noisy(origin, 2.0, np.random.default_rng(1)).kernel - origin.kernel
    np.testing.assert_allclose(np.linalg.norm(added, axis=0), 2 * np.linalg.norm(origin.kernel, axis=0), rtol=1e-5)


def test_vectors_help_where_images_are_few(tmp_path):
    options = Options(tmp_path, images=(1,), noises=(0.5,), seeds=(0,))
    found = few_labels.compare(images(120, 0), images(200, 1), COLUMNS, options, seed=0)
    assert found["0"]["0.5"] > 0.8
    assert found["1"]["0.5"] > found["1"]["without"]
    text = few_labels.table({"0": found, "1": found}, options.noises)
    assert text.splitlines()[0].split("|")[1:-1] == [" images per label ", " without ", " noise 0.5 "]
    assert len(text.splitlines()) == 4
