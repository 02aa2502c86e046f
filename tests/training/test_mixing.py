"""MixUp, CutMix and SpliceMix of a batch, against loops over its images."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.bench import drawn_batch
from scipy.ndimage import zoom

from mlmoe_jax.models.heads.linear import LinearHead
from mlmoe_jax.models.mosaics import CELLS, cell_consistency
from mlmoe_jax.models.outputs import Features
from mlmoe_jax.training.mixing import cutmix, make_mixing, mixup, splicemix

SIDE = 12


def make_batch(size=6, **arrays):
    return drawn_batch(size, SIDE, 4) | arrays


def compiled(function):
    """Return the function as one program, whose results are in numpy: operations one by one are many programs."""
    program = jax.jit(function)
    return lambda *arguments: jax.device_get(program(*arguments))


def mixing(**settings):
    return compiled(make_mixing(SimpleNamespace(**{"mix": "mixup", "mix_alpha": 1.0, **settings})))


def test_mixup_is_the_weighted_mean_with_the_image_before():
    features, share = np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32), np.array([0.2, 1.0, 0.7])
    batch = make_batch(3, features=features)
    mixed = compiled(mixup)(batch, share.astype(np.float32))
    assert mixed["image"].dtype == np.uint8
    for name, step in (("image", 0.5), ("features", 1e-6), ("label", 1e-6)):
        values = batch[name].astype(np.float64)
        expected = [share[i] * values[i] + (1 - share[i]) * values[i - 1] for i in range(3)]
        np.testing.assert_allclose(mixed[name], expected, atol=step + 1e-4)
    np.testing.assert_array_equal(mixed["id"], batch["id"])


def test_cutmix_weights_targets_by_the_area_of_the_rectangle():
    batch, share = make_batch(40), np.linspace(0, 1, 40, dtype=np.float32)
    mixed = compiled(cutmix)(batch, share, jax.random.key(3))
    before, after = batch["image"], mixed["image"]
    other = np.roll(before, 1, axis=0)
    for i in range(40):
        replaced = (after[i] != before[i]).any(axis=-1)
        rows, columns = replaced.any(axis=1).nonzero()[0], replaced.any(axis=0).nonzero()[0]
        np.testing.assert_array_equal(after[i][replaced], other[i][replaced])
        area = np.prod([np.ptp(places) + 1 for places in (rows, columns)]) if rows.size else 0
        kept = 1 - area / SIDE**2
        assert kept >= share[i] - 1e-6, "the rectangle is clipped at the borders"
        expected = kept * batch["label"][i] + (1 - kept) * batch["label"][i - 1]
        np.testing.assert_allclose(mixed["label"][i], expected, atol=1e-6)


def test_a_label_is_known_if_both_images_know_it():
    known = np.array([[1, 1, 0, 0], [1, 0, 1, 0]], np.float32)
    mixed = compiled(mixup)(make_batch(2, label_mask=known), np.array([0.5, 1.0], np.float32))
    np.testing.assert_array_equal(mixed["label_mask"], [[1, 0, 0, 0], [1, 0, 1, 0]])


@pytest.mark.slow
@pytest.mark.parametrize("mix", ["mixup", "cutmix"])
def test_an_image_that_could_not_be_read_is_not_mixed_into_another(mix):
    batch = make_batch(4, mask=np.array([1, 0, 1, 1], np.float32))
    mixed = mixing(mix=mix)(batch, jax.random.key(0))
    for name in ("image", "label", "label_mask"):
        np.testing.assert_array_equal(mixed[name][2], batch[name][2])
    assert not np.array_equal(mixed["image"][3], batch["image"][3])


@pytest.mark.slow
def test_shares_have_the_distribution_of_the_config():
    size = 4000
    batch = make_batch(size, image=np.zeros((size, 1, 1, 3), np.uint8), label=np.tile(np.eye(2), (size // 2, 2)))
    share = mixing(mix_alpha=0.4)(batch, jax.random.key(1))["label"][:, 0]
    share = np.where(np.arange(size) % 2 == 0, share, 1 - share)  # of the image itself
    assert share.mean() == pytest.approx(0.5, abs=0.03)
    assert share.var() == pytest.approx(0.25 / (2 * 0.4 + 1), rel=0.05), "of Beta(0.4, 0.4)"


@pytest.mark.slow
def test_both_draws_one_of_the_two_per_step():
    batch = make_batch(2, image=np.stack([np.zeros((SIDE, SIDE, 3)), np.full((SIDE, SIDE, 3), 255)]).astype(np.uint8))
    both = mixing(mix="both")
    images = [both(batch, jax.random.key(i))["image"] for i in range(12)]
    assert {bool(((image > 0) & (image < 255)).any()) for image in images} == {False, True}


def zoomed(image, rows, columns):
    """Resize images by linear interpolation between corner pixels, with scipy."""
    return zoom(image.astype(np.float64), (1, rows / image.shape[1], columns / image.shape[2], 1), order=1)


@pytest.mark.parametrize("side", [12, 13])
def test_splicemix_appends_mosaics_of_four_images(side):
    """The labels are unions; the mask of an image that could not be read passes to its mosaic."""
    draw = np.random.default_rng(1)
    known = np.ones((9, 4), np.float32)
    known[::2, 0] = 0
    batch = make_batch(9, label_mask=known, mask=np.array([1, 1, 1, 1, 1, 0, 1, 1, 1], np.float32))
    batch["image"] = draw.integers(0, 256, (9, side, side, 3), np.uint8)
    batch["label"] *= known
    mixed = compiled(partial(splicemix, consistent=True))(batch, jax.random.key(0))
    assert mixed["image"].shape[0] == 9 + 2
    assert CELLS not in jax.eval_shape(splicemix, batch, jax.random.key(0))
    assert len(set(np.ravel(mixed[CELLS]).tolist())) == 8
    small = zoomed(batch["image"], side // 2, side // 2)
    for i, cells in enumerate(mixed[CELLS]):
        upper, lower = (np.concatenate(small[cells[k : k + 2]], axis=1) for k in (0, 2))
        expected = zoomed(np.concatenate([upper, lower])[None], side, side)[0]
        np.testing.assert_allclose(mixed["image"][9 + i], expected, atol=0.501)
        np.testing.assert_array_equal(mixed["label"][9 + i], batch["label"][cells].max(axis=0))
        sure = known[cells].all(axis=0) | (batch["label"][cells] == 1).any(axis=0)
        np.testing.assert_array_equal(mixed["label_mask"][9 + i], sure)
        assert mixed["mask"][9 + i] == (5 not in cells)
    for name in ("image", "label", "label_mask", "mask", "id"):
        np.testing.assert_array_equal(mixed[name][:9], batch[name])


def max_head() -> LinearHead:
    return LinearHead(5, 3, pool="max", rngs=nnx.Rngs(0))


def test_the_consistency_of_a_batch_is_the_mean_over_the_mosaics_whose_images_were_read():
    head, draw = max_head(), np.random.default_rng(0)
    maps, cells = jnp.asarray(draw.normal(size=(10, 16, 5)), jnp.float32), jnp.asarray([[3, 1, 0, 2], [4, 5, 6, 7]])
    features, model = (
        Features(None, None, maps, (4, 4)),
        SimpleNamespace(classify=lambda features, **options: head(features)),
    )

    def mean_over(*unreadable: int) -> float:
        mask = 1 - np.isin(np.arange(10), unreadable).astype(np.float32)
        penalty = cell_consistency(model, features, head(features), {CELLS: cells, "mask": mask})
        return float(jnp.sum(penalty * mask) / mask.sum())  # as the objective reduces it

    both, first, second = mean_over(), mean_over(4, 9), mean_over(3, 8)
    assert first != pytest.approx(second)
    assert both == pytest.approx((first + second) / 2)
    assert mean_over(4, 5, 9) == pytest.approx(first), "further images of the other mosaic do not matter"
    assert mean_over(3, 4, 8, 9) == 0


def test_the_cells_of_a_mosaic_agree_with_its_images():
    """The value, and the gradient by the map, in which the targets are constants, against numpy in float64."""
    head, draw = max_head(), np.random.default_rng(0)
    kernel, bias = (np.asarray(x[...], np.float64) for x in (head.classifier.kernel, head.classifier.bias))
    maps, cells = draw.normal(size=(6, 16, 5)), np.array([[3, 1, 0, 2]])
    batch = {CELLS: jnp.asarray(cells), "mask": jnp.ones(6)}
    model = SimpleNamespace(classify=lambda features, **options: head(features))

    def exact(maps, targets):
        corners = maps[5:].reshape(1, 2, 2, 2, 2, 5).max(axis=(2, 4)).reshape(4, 5)
        logits = corners @ kernel + bias
        return (np.logaddexp(0, logits) - targets * logits).mean()

    def ours(maps):
        features = Features(None, None, maps, (4, 4))
        return cell_consistency(model, features, head(features), batch).mean()

    targets = 1 / (1 + np.exp(-(maps[cells[0]].max(axis=1) @ kernel + bias)))
    value, gradient = compiled(jax.value_and_grad(ours))(maps.astype(np.float32))
    np.testing.assert_allclose(value, exact(maps, targets), rtol=2e-5)
    assert not np.any(gradient[:5])
    toward = draw.normal(size=maps.shape)
    slope = (exact(maps + 1e-6 * toward, targets) - exact(maps - 1e-6 * toward, targets)) / 2e-6
    np.testing.assert_allclose((gradient * toward).sum(), slope, rtol=1e-3)
