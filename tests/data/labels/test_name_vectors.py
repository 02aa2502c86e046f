import numpy as np
import pytest
from helpers.name_vectors import drawn_vectors
from safetensors import safe_open

from mlmoe_jax.data.labels.name_vectors import (
    LabelName,
    is_vectors_file,
    mean_direction,
    read_classes,
    read_label_names,
    read_name_vectors,
    unit,
)

NAMES = ("sea", "boat", "red kite")


def assert_same(one, other):
    assert one.about() == other.about()
    assert one.arrays().keys() == other.arrays().keys()
    for name, array in one.arrays().items():
        np.testing.assert_array_equal(array, other.arrays()[name], err_msg=name)


def test_a_list_has_a_name_per_line_and_descriptions_after_tabs(tmp_path):
    (tmp_path / "labels.txt").write_text("sea\n\n boat \twith sails\t\twith oars\nre\u0301gate\r\n")
    labels = read_label_names(tmp_path / "labels.txt")
    assert labels == (LabelName("sea"), LabelName("boat", ("with sails", "with oars")), LabelName("régate"))
    assert read_classes(tmp_path / "labels.txt") == ("sea", "boat", "régate")


@pytest.mark.parametrize(
    "names",
    [
        "dog\ncat\nred kite",
        "dog",
        "#sunset\n#beach",  # hashtags
        "C#\nC++\nF#",
        "Boeing 747\nAirbus A320\nPeugeot 206",
        "1 euro\n2 euro\n10 cent\n20 cent",
        "0\n1\n2",
        "3D printer\ncat\n1. FC Köln\nHertha",
        "Type 0\nType 1",
        '5" pipe\n12" pipe',
        "plant (potted)\nT-shirt\n(sky)\nX-ray",
        "tench, Tinca tinca\ngoldfish, Carassius auratus\nhen",  # of ImageNet
        "A\na\n^_^\n^-^\n<o>_<o>\n;)\n🐶",
        "animal/dog\nanimal/cat",
        "E. coli\nS. aureus\nV. cholerae",
        "color: red\ncolor: blue\nsize: 1\nsize: 2",
        "Apple - scab\nApple - rust",
        "/a/abbey\n/b/bank/indoor",  # of SUN397
        "2021 05\n2021 06\n50 70",
        "16:9\nISO:100\nf 1.8\ncaliber .45\nUSB 1.1",
    ],
)
def test_names_that_look_unusual_are_read(names, tmp_path):
    (tmp_path / "labels.txt").write_text(names)
    assert read_classes(tmp_path / "labels.txt") == tuple(names.split("\n"))


def test_a_description_says_that_a_text_is_a_name(tmp_path):
    names = ("none", "label:", "# animals", "dog, cat", "5", "Alien: Covenant")
    (tmp_path / "labels.txt").write_text(
        "".join(f"{name}\ta photo of it, taken by day: for {name}\n" for name in names)
    )
    assert read_classes(tmp_path / "labels.txt") == names


def test_the_mean_of_normalized_vectors_is_normalized():
    vectors = np.array([[3.0, 0.0], [0.0, 1.0]])
    np.testing.assert_allclose(mean_direction(vectors), [2**-0.5, 2**-0.5])
    np.testing.assert_allclose(unit(vectors), [[1, 0], [0, 1]])


def test_the_classifier_gives_the_scores_of_the_model():
    background = np.array([0.6, 0.8, 0, 0], np.float32)
    vectors = drawn_vectors(NAMES, 4, scale=100.0, bias=-3.0, background=background)
    image = unit(np.random.default_rng(5).normal(size=(7, 4)))
    logits = image @ vectors.kernel() + vectors.offsets()
    expected = [[100 * u @ (t - background) - 3 for t in vectors.vectors] for u in image]
    np.testing.assert_allclose(logits, expected, rtol=1e-5)
    assert vectors.kernel().dtype == vectors.offsets().dtype == np.float32


@pytest.mark.parametrize("projects_from", [0, 6])
def test_a_file_returns_what_was_written(tmp_path, projects_from):
    descriptions = ((), ("with sails", "with oars"), ())
    fields = {"templates": ("a {}.",), "descriptions": descriptions, "fingerprint": "ab12"}
    vectors = drawn_vectors(NAMES, 4, projects_from=projects_from, **fields)
    vectors.write(path := tmp_path / "labels.safetensors")
    stored = read_name_vectors(path)
    assert len(stored.sha256) == 64
    assert_same(type(stored)(**(vars(stored) | {"sha256": ""})), vectors)
    assert read_classes(path) == NAMES
    assert is_vectors_file(path)
    assert not is_vectors_file(tmp_path / "labels.txt")
    with safe_open(path, "numpy") as file:
        assert list(file.metadata()) == ["mlmoe_jax"]
    first = path.read_bytes()
    vectors.write(path)
    assert path.read_bytes() == first
