"""Label names become vectors, and the scores of their model are those of the published image-text model."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from helpers.text_towers import arrays_of, use_twin

from mlmoe_jax.data.labels.name_vectors import LabelName, mean_direction, unit
from mlmoe_jax.data.labels.space import label_space_of
from mlmoe_jax.inference import text_encoder
from mlmoe_jax.inference.by_names import names_origin
from mlmoe_jax.inference.text_encoder import encode_file, encode_names, encode_tokens, tokenize, vectors_for
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.text.catalog import TEXT_CATALOG
from tools.parity import text_towers as twins
from tools.parity.vit import image

TWINS = ["siglip2", "clip_quick_gelu"]


def encode_texts(backbone: str, texts: list[str]) -> tuple:
    return encode_tokens(backbone, *tokenize(backbone, texts), weights="auto")


@pytest.fixture
def twin(tmp_path, monkeypatch):
    """A function that puts a twin into the catalog, and returns the name of its backbone; batches are small."""
    monkeypatch.setattr(text_encoder, "TEXTS_PER_CALL", 2)
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
    tokenize = text_encoder.tokenize
    monkeypatch.setattr(text_encoder, "tokenize", lambda b, texts: seen.append(texts) or tokenize(b, texts))
    templates = ["a photo of the {}.", "art of a {}", "a {} in a video game.", "an X-ray of {}s, from the side"]
    vectors = encode_names(backbone, [LabelName("cat")], templates)
    without = ["a photo.", "art", "in a video game.", "an X-ray, from the side"]
    assert seen[:1] == [
        ["a photo of the cat.", "art of a cat", "a cat in a video game.", "an X-ray of cats, from the side", *without]
    ]
    np.testing.assert_allclose(vectors.background, mean_direction(encode_texts(backbone, without)[0]), atol=1e-6)


def test_images_are_prepared_as_published():
    """As in the published files preprocessor_config.json, and open_clip_config.json of OpenCLIP."""
    published = {name: tuple(catalog.entry(name).images.values()) for name in TEXT_CATALOG}
    assert {name: how for name, how in published.items() if "clip_" in name} == {
        "clip_vitb16": (224, "clip"),
        "clip_vitl14": (224, "clip"),
        "clip_vitl14_336": (336, "clip"),
        **{f"openclip_vit{size}_{data}": (224, "clip") for size in ("b16", "l14") for data in ("laion2b", "datacomp")},
    }
    others = {name: how for name, how in published.items() if "clip_" not in name}
    assert others == {
        name: (448 if name.startswith("tips") else int(name.rpartition("_")[2]), "square") for name in others
    }
    half = {name for name in published if catalog.entry(name).mean == (0.5,) * 3}
    assert half == {"openclip_vitl14_laion2b", *(name for name in others if name.startswith("siglip2_"))}


@pytest.mark.parametrize(("name", "resize"), [("clip_quick_gelu", "clip"), ("siglip2", "square")])
def test_a_prediction_by_names_reads_images_as_published(twin, tmp_path, name, resize):
    backbone = twin(name)
    encode_names(backbone, [LabelName("cat")]).write(file := tmp_path / "v.safetensors")
    config = names_origin(str(file)).config
    assert (config.data.image_size, config.data.resize) == (28, resize)
    assert names_origin(str(file), overrides={"data.resize": "crop"}).config.data.resize == "crop"


def test_canonical_texts_are_lower_case_without_punctuation(twin, tmp_path):
    backbone = twin("siglip2")
    (tmp_path / "labels.txt").write_text("Traffic_Light\ndog\tA big, UGLY dog!\n")
    file = tmp_path / "v.safetensors"
    key = {"model.backbone.canonical_texts": True}
    vectors = encode_file(tmp_path / "labels.txt", str(file), backbone, overrides=key)
    assert vectors.templates == ("this is a photo of {}",)
    texts = ["this is a photo of traffic light", "a big, ugly dog"]
    np.testing.assert_allclose(vectors.vectors, unit(encode_texts(backbone, texts)[0]), atol=1e-6)
    asked = names_origin(str(tmp_path / "labels.txt"), backbone, key).label_space.name_vectors
    np.testing.assert_array_equal(asked.vectors, vectors.vectors)
    raw = encode_file(tmp_path / "labels.txt", str(file), backbone)
    assert raw.templates == ("This is a photo of {}.",)
    assert np.abs(raw.vectors - vectors.vectors).max() > 0.01


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
