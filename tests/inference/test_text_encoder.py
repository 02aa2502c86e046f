"""Label names become vectors, and the scores of their model are those of the published image-text model."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from helpers.text_towers import arrays_of, use_twin

from mlmoe_jax.data.labels.name_vectors import LabelName, mean_direction
from mlmoe_jax.data.labels.space import label_space_of
from mlmoe_jax.inference import text_encoder
from mlmoe_jax.inference.by_names import names_origin
from mlmoe_jax.inference.text_encoder import encode_names, encode_texts, vectors_for
from tools.parity import text_towers as twins
from tools.parity.vit import image

TWINS = ["siglip2", "clip_quick_gelu"]


@pytest.fixture
def twin(tmp_path, monkeypatch):
    """A function that puts a twin into the catalog, and returns the name of its backbone; batches are small."""
    monkeypatch.setattr(text_encoder, "BATCH", 2)
    return lambda name: use_twin(monkeypatch, tmp_path / "cache", name)


@pytest.mark.parametrize("name", TWINS)
def test_scores_by_names_are_those_of_transformers(twin, tmp_path, name):
    backbone, places = twin(name), [12, 15, 18, 21]
    texts = [twins.strings()[place] for place in places]
    labels = [LabelName(f"label {place}", (text,)) for place, text in zip(places, texts, strict=True)]
    vectors = encode_names(backbone, labels)
    assert vectors.background.any() == (name != "siglip2")
    vectors = replace(vectors, background=np.zeros_like(vectors.background))  # the plain logits
    vectors.write(file := tmp_path / "v.safetensors")
    parts = names_origin(str(file)).parts(label_space_of(vectors))
    model = parts.definition.merge(parts.trainable, parts.frozen)
    logits = jax.jit(lambda x: model(x).logits)(image(3, 4, 4))
    expected = arrays_of(name)["scores"][:, places]
    assert np.abs(logits - expected).max() / np.abs(expected).max() < 2e-5
    assert ("head/projection/kernel" in parts.frozen) == (name != "siglip2")


def test_the_vector_of_a_name_is_the_mean_of_its_templates(twin):
    backbone = twin("siglip2")
    labels = [LabelName("cat"), LabelName("dog", ("a small dog", "an ugly dog", "dogs"))]
    vectors = encode_names(backbone, labels, ["a {}.", "art of the {}"])
    texts = ["a cat.", "art of the cat", "a small dog", "an ugly dog", "dogs"]
    raw, similarity = encode_texts(backbone, texts)
    for got, rows in zip(vectors.vectors, (raw[:2], raw[2:]), strict=True):
        np.testing.assert_allclose(got, mean_direction(rows), atol=1e-6)
    assert (vectors.names, vectors.templates) == (("cat", "dog"), ("a {}.", "art of the {}"))
    assert vectors.descriptions == ((), labels[1].descriptions)
    assert vectors.scale == pytest.approx(float(similarity.scale[...]))
    assert vectors.bias == pytest.approx(-0.125)
    assert not vectors.background.any()
    assert encode_names(backbone, labels[:1]).templates == ("This is a photo of {}.",)


def test_a_vector_does_not_depend_on_the_texts_beside_it(twin):
    backbone, texts = twin("clip_quick_gelu"), ["cat", "a photo of a large dog", "art"]
    together, _ = encode_texts(backbone, texts)
    alone, _ = encode_texts(backbone, texts[:1])
    np.testing.assert_allclose(together[0], alone[0], rtol=1e-4, atol=1e-5)


def test_the_background_of_a_softmax_model_is_its_templates_without_a_name(twin, monkeypatch):
    backbone, seen = twin("clip_quick_gelu"), []
    encode = encode_texts
    monkeypatch.setattr(text_encoder, "encode_texts", lambda b, texts, **o: seen.append(texts) or encode(b, texts, **o))
    templates = ["a photo of the {}.", "art of a {}", "a {} in a video game.", "an X-ray of {}s, from the side"]
    vectors = encode_names(backbone, [LabelName("cat")], templates)
    without = ["a photo.", "art", "in a video game.", "an X-ray, from the side"]
    assert seen == [
        ["a photo of the cat.", "art of a cat", "a cat in a video game.", "an X-ray of cats, from the side", *without]
    ]
    np.testing.assert_allclose(vectors.background, mean_direction(encode(backbone, without)[0]), atol=1e-6)


def test_a_list_of_names_is_encoded_once(twin, tmp_path, monkeypatch):
    backbone = twin("siglip2")
    (tmp_path / "labels.txt").write_text("cat\ndog\n")
    vectors = names_origin(str(tmp_path / "labels.txt"), backbone).label_space.name_vectors
    assert vectors.names == ("cat", "dog")
    assert len(vectors.sha256) == len(vectors.fingerprint) == 64
    vectors.write(tmp_path / "v.safetensors")
    monkeypatch.setattr(text_encoder, "encode_names", None)
    origin = names_origin(str(tmp_path / "v.safetensors"), backbone)
    np.testing.assert_array_equal(vectors_for(origin.config).vectors, vectors.vectors)
    (tmp_path / "v.safetensors").unlink()
    np.testing.assert_array_equal(origin.label_space.name_vectors.vectors, vectors.vectors)
