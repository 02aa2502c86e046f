"""Images that are nearly equal are one unit of folds and of held-out parts."""

import io

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from mlmoe_jax.config import default_config
from mlmoe_jax.data.images import EncodedImages
from mlmoe_jax.data.sources.open import _hold_out
from mlmoe_jax.data.split import Split
from mlmoe_jax.data.twins import cosine_blocks, describe, find_units, join_twins, read_histograms, shared_twins

SCENES, FRAMES = 24, 5


class Encoded(EncodedImages):
    def __init__(self, files):
        self.files = files

    def __len__(self):
        return len(self.files)

    def encoded(self, row):
        return self.files[row]


def scene(seed):
    """An image with edges at random places, 200 × 150."""
    small = np.random.default_rng(seed).integers(0, 255, (6, 8, 3), np.uint8)
    return Image.fromarray(small).resize((200, 150), Image.Resampling.BICUBIC)


def encode(image):
    image.save(buffer := io.BytesIO(), "JPEG", quality=90)
    return buffer.getvalue()


def frames(seed):
    """A pan over 8 % of the width, with changes of the brightness, whose last frame is mirrored."""
    for number in range(FRAMES):
        left = number * 4
        frame = ImageEnhance.Brightness(scene(seed).crop((left, 0, left + 184, 150))).enhance(0.96 + 0.02 * number)
        yield frame.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if number == FRAMES - 1 else frame


@pytest.fixture(scope="module")
def clips():
    files = [encode(frame) for seed in range(SCENES) for frame in frames(seed)]
    ids = [f"{row}.jpg" for row in range(len(files))]
    return Split("train", ("a",), np.ones((len(files), 1), np.int8), ids, Encoded(files))


def scenes_of(ids):
    return np.array([int(name.removesuffix(".jpg")) // FRAMES for name in ids])


def test_frames_of_a_clip_are_one_unit_and_other_images_none(clips, caplog, capsys):
    joined = join_twins(clips, default_config().data)
    names, unit = np.unique(joined.units, return_inverse=True)
    assert len(names) == SCENES
    assert (unit[:, None] == unit).sum() == SCENES * FRAMES**2
    assert joined.groups[1] == "0.jpg", "the least id"
    assert "120 images of train are nearly equal to another one" in capsys.readouterr().err
    alone = clips.take(np.arange(0, len(clips), FRAMES), "train")
    assert join_twins(alone, default_config().data) is alone


def test_given_groups_win(clips):
    groups = ["g"] * 7 + [""] * (len(clips) - 7)
    given = Split("train", clips.classes, clips.labels, clips.ids, clips.images, groups)
    joined = join_twins(given, default_config().data)
    assert joined.groups[:10] == ["g"] * 7 + ["7.jpg"] * 3


def test_held_out_images_have_no_twin_in_training(clips):
    config = default_config().data
    config.val_split, config.val_fraction = "val", 0.3

    def parts():
        return [set(scenes_of(_hold_out(clips, name, config, 0).ids)) for name in ("train", "val")]

    train, val = parts()
    assert train
    assert val
    assert not train & val
    config.join_twins = False
    assert set.intersection(*parts())


def test_images_of_other_splits_that_are_nearly_equal_to_training_images_are_said(clips):
    config = default_config().data
    rows = np.arange(len(clips))
    whole = clips.take(rows[rows >= FRAMES], "train")  # without the first scene
    train = whole.take(np.flatnonzero(np.arange(len(whole)) % FRAMES != 2), "train")
    test = clips.take(rows[rows % FRAMES == 2], "test")
    assert shared_twins(train, [train, test], config) == [
        "23 of the 24 images of split test are nearly equal to training images, such as 7.jpg to 6.jpg, so results on "
        "them are too good; move all images of a scene into one split"
    ]
    assert shared_twins(train, [clips.take(rows[:FRAMES], "test")], config) == []
    config.join_twins = False
    assert shared_twins(train, [test], config) == []


def test_unreadable_and_plain_images_are_similar_to_none(clips):
    plain = encode(Image.new("RGB", (40, 40), (200, 30, 30)))
    files = [b"no image", b"no image", plain, plain, *clips.images.files[::FRAMES]]
    split = Split("train", ("a",), np.ones((len(files), 1), np.int8), list(map(str, range(len(files)))), Encoded(files))
    histograms = read_histograms(split, default_config().data)
    assert not histograms[:4].any()
    assert histograms[4:].any(axis=(1, 2, 3)).all()
    assert len(set(find_units(histograms))) == len(files)


def test_a_description_does_not_change_with_size_and_is_mirrored_with_the_image():
    large = np.asarray(scene(0).resize((800, 600)))
    histogram, mirrored = describe(large), describe(large[:, ::-1])
    assert np.abs(histogram - describe(np.asarray(scene(0)))).max() < 0.15 * histogram.max()
    np.testing.assert_allclose(np.roll(histogram[:, ::-1, ::-1], 1, axis=-1), mirrored, atol=0.1 * histogram.max())


def test_cosines_are_of_differences_from_the_mean(monkeypatch):
    monkeypatch.setattr("mlmoe_jax.data.twins.BLOCK_PAIRS", 70)
    vectors = np.random.default_rng(0).normal(5, 1, (30, 4))
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    centered = unit - unit.mean(axis=0)
    centered /= np.linalg.norm(centered, axis=1, keepdims=True)
    blocks = list(cosine_blocks(vectors, vectors))
    assert [start for start, _ in blocks] == list(range(0, 30, 2))
    np.testing.assert_allclose(np.concatenate([cosines for _, cosines in blocks]), centered @ centered.T, atol=1e-5)


def drawn(images, *cosines):
    """Histograms of unlike images, each followed by one per value of `cosines` with this cosine to it."""
    random = np.random.default_rng(0)
    first, *others = (np.linalg.qr(random.normal(size=(images, 512)).T)[0].T for _ in range(len(cosines) + 1))
    rows = [first, *(c * first + np.sqrt(1 - c**2) * other for c, other in zip(cosines, others, strict=True))]
    return np.stack(rows, axis=1).reshape(-1, 8, 8, 8)


def test_features_join_what_histograms_support():
    histograms = drawn(30, 0.55)
    features = np.repeat(np.eye(30), 2, axis=0)
    assert len(set(find_units(histograms))) == 60, "0.55 is too little without features"
    np.testing.assert_array_equal(find_units(histograms, features), np.repeat(np.arange(30), 2))
    apart = features.copy()
    apart[1] = np.eye(30)[7]  # similar to images whose histograms differ
    unit = find_units(histograms, apart)
    assert unit[0] != unit[1]
    assert (unit == unit[14]).tolist() == [row in (14, 15) for row in range(60)]


def test_features_that_only_tell_the_label_have_no_say():
    """All images of a label have similar features, and of the six pairs two have similar histograms."""
    histograms = drawn(40, 0.55)
    by_label = np.repeat(np.eye(20), 4, axis=0)
    assert len(set(find_units(histograms, by_label))) == 80


def test_uniform_images_are_no_units(caplog):
    angles = np.linspace(0, 2 * np.pi, 40, endpoint=False)
    circle = np.zeros((40, 512))
    circle[:, 0], circle[:, 1] = np.cos(angles), np.sin(angles)
    assert len(set(find_units(circle.reshape(-1, 8, 8, 8)))) == 40, "each is like its neighbors on a circle"
    assert "40 of 40 images are nearly equal" in caplog.text
