"""TIPSv2, from published files to scores, against transformers, and what it must not do."""

import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.paths import PARITY
from helpers.tensor_files import renamed, write
from helpers.twins import below, error, write_weights

from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.backbones.vit import ViT
from mlmoe_jax.models.text.catalog import text_entry
from mlmoe_jax.pretrained.load import load_weights
from mlmoe_jax.pretrained.text_towers import load_text_tower
from mlmoe_jax.pretrained.tokenizers import lower, open_tokenizer
from tools.parity import text_towers, vit
from tools.parity import tips as twins

TOLERANCE = 2e-5
STORED = np.load(PARITY / "tips.npz")
PUBLISHED = catalog.entry("tipsv2_vitb14").shape
ENTRY = text_entry("tipsv2_vitb14")
SMALL = replace(ENTRY, shape=replace(ENTRY.shape, **twins.TEXT, vocabulary=twins.VOCABULARY))


@pytest.fixture(autouse=True, scope="module")
def exact_products():
    with jax.default_matmul_precision("highest"):
        yield


class Twin:
    """Both towers of a twin, from the file that transformers wrote."""

    def __init__(self, mlp: str, file: Path, arrays: dict[str, np.ndarray]):
        self.arrays = arrays
        shape = replace(PUBLISHED, **twins.VISION, mlp=mlp)
        self.vision = nnx.eval_shape(lambda: ViT(shape, rngs=nnx.Rngs(0)))
        load_weights(self.vision, file)
        self.text, self.tokens = load_text_tower(SMALL.shape, file, arrays["tokens"])


def twin_of(folder: Path, mlp: str, prefix: str = "weights/") -> Twin:
    arrays = below(STORED, f"{mlp}/")
    named = {f"weights/{name}": x for name, x in below(arrays, prefix).items()}
    return Twin(mlp, write_weights(folder / "model.safetensors", named), arrays)


@pytest.fixture(scope="module", params=twins.TWINS)
def twin(request, tmp_path_factory):
    return twin_of(tmp_path_factory.mktemp("tips"), request.param)


@pytest.fixture(scope="module")
def gelu(tmp_path_factory):
    return twin_of(tmp_path_factory.mktemp("tips"), "gelu")


@jax.jit
def vectors_of(tower, tokens, valid):
    return tower(tokens, valid)


@jax.jit
def features_of(vision, image):
    return vision(image, read=("cls", "patches"))


def scores(vision, text, tokens, valid):
    image, vectors = vision(jnp.asarray(vit.image(3, 4, 4))).cls, text(tokens, valid)
    image, vectors = (x / jnp.linalg.norm(x, axis=1, keepdims=True) for x in (image, vectors))
    return text.similarity.scale[...] * image @ vectors.T


# ------------------------------------------------------------------------------------------------- against transformers
def test_features_and_vectors_are_those_of_transformers(twin):
    """A text that was cut is among them."""
    features = features_of(twin.vision, vit.image(3, 4, 4))
    assert error(features.cls, twin.arrays["cls"]) < TOLERANCE
    assert error(features.patches, twin.arrays["tokens_of_image"][:, 2:]) < TOLERANCE
    vectors = vectors_of(twin.text, twin.tokens, twin.arrays["valid"])
    assert error(vectors, twin.arrays["vectors"]) < TOLERANCE


@pytest.mark.variants("twin")
def test_scores_and_gradients_are_those_of_transformers(twin, tmp_path):
    """The gradients of both towers, read by the rules for weights, which only move and join numbers."""
    weights, valid = twins.weighted(twin.arrays["scores"].shape), twin.arrays["valid"]
    definition, state = nnx.split((twin.vision, twin.text))

    def number(state):
        found = scores(*nnx.merge(definition, state), twin.tokens, valid)
        return jnp.sum(found * weights), found

    gradients, found = jax.jit(jax.grad(number, has_aux=True))(state)
    assert error(found, twin.arrays["scores"]) < TOLERANCE
    theirs = twin_of(tmp_path, twin.vision.shape.mlp, "gradient/")
    reference = nnx.to_flat_state(nnx.split((theirs.vision, theirs.text))[1])
    compared = 0
    for (path, ours), (_, value) in zip(nnx.to_flat_state(gradients), reference, strict=True):
        if path[-1] == "mask_token":
            assert not np.asarray(ours[...]).any()
        elif path[-1] == "scale" and "similarity" in path:  # d/d(1/T) = −T² d/dT
            slope = -(twins.TEMPERATURE**2) * twin.arrays["gradient/temperature"]
            np.testing.assert_allclose(ours[...], slope, rtol=1e-3)
        else:
            compared += 1
            assert error(ours[...], np.asarray(value[...])) < 1e-4, path
    assert compared == (5 + 2 * 14 + 2) + (1 + 2 * 12 + 2)


def test_tokens_of_a_thousand_texts_are_those_of_transformers():
    """Accents, emoji, CJK, blanks, punctuation and long texts."""
    tokens, valid = open_tokenizer(PARITY / "text_tips.model", SMALL).encode(text_towers.strings())
    np.testing.assert_array_equal(tokens, STORED["strings/tokens"])
    np.testing.assert_array_equal(valid, STORED["strings/valid"])


# ---------------------------------------------------------------------------------------------------------- other files
def scenic(arrays):
    """Return the tensors of the text tower under the names of the authors' code for JAX."""
    width, heads = twins.TEXT["width"], twins.TEXT["heads"]
    tensors = {"temperature_contrastive": arrays["weights/temperature"]}
    block, attention = r"transformer/encoderblock_\1", "MultiHeadDotProductAttention_0"
    names = (
        (r"^transformer\.resblocks\.(\d+)", block),
        *((r"\.ln_1\.weight", "/LayerNorm_0/scale"), (r"\.ln_2\.weight", "/LayerNorm_1/scale")),
        *((r"\.ln_1\.", "/LayerNorm_0/"), (r"\.ln_2\.", "/LayerNorm_1/")),
        *((r"\.mlp\.c_fc\.", "/MlpBlock_0/Dense_0/"), (r"\.mlp\.c_proj\.", "/MlpBlock_0/Dense_1/")),
        *((r"\.attn\.out_proj\.", f"/{attention}/out/"), (r"\.attn\.in_proj_", f"/{attention}/")),
        *((r"^ln_final\.weight", "text_encoder_norm/scale"), (r"^ln_final\.", "text_encoder_norm/")),
        *((r"^token_embedding\.weight", "token_emb/emb_var"), ("weight", "kernel")),
    )
    for name, value in renamed(below(arrays, "weights/text_encoder."), *names).items():
        value = value.T if name.endswith("kernel") else value
        if re.search(rf"{attention}/(kernel|bias)", name):
            for part, piece in zip(("query", "key", "value"), np.split(value, 3, axis=-1), strict=True):
                own = name.replace(attention, f"{attention}/{part}")
                tensors[own] = piece.reshape(*piece.shape[:-1], heads, width // heads)
        elif name.endswith("out/kernel"):
            tensors[name] = value.reshape(heads, width // heads, width)
        else:
            tensors[name] = value
    return tensors


def pytorch(arrays):
    """Return the tensors of the text tower under the names of the authors' code for PyTorch."""
    return below(arrays, "weights/text_encoder.") | {"temperature": arrays["weights/temperature"][None]}


@pytest.mark.parametrize("layout", [pytorch, scenic])
def test_the_authors_file_has_the_same_tower(gelu, tmp_path, layout):
    file = write(tmp_path / "tips_text.npz", layout(gelu.arrays))
    other, tokens = load_text_tower(SMALL.shape, file, gelu.arrays["tokens"])
    np.testing.assert_array_equal(tokens, gelu.tokens)
    for ours, theirs in zip(*(jax.tree.leaves(nnx.state(x)) for x in (other, gelu.text)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


# ---------------------------------------------------------------------------------------------------------------- traps
def test_padding_is_in_no_mean_and_no_attention(gelu):
    valid = gelu.arrays["valid"]
    vectors = np.asarray(vectors_of(gelu.text, gelu.tokens, valid))
    other = np.where(valid, gelu.tokens, gelu.tokens[0, 0])
    assert error(vectors_of(gelu.text, other, valid), vectors) < 1e-6


def test_a_text_without_tokens_has_no_direction(gelu):
    assert not np.asarray(vectors_of(gelu.text, gelu.tokens[:1], np.zeros((1, twins.LENGTH), bool))).any()


def test_texts_are_in_lower_case():
    """Letters without a form of their own in ASCII; the others are among the thousand texts."""
    assert lower("ΣΊΣΥΦΟΣ\u00a0 İ\n") == "σίσυφοσ i̇"


def test_the_towers_at_full_size_have_the_settings_of_transformers():
    """Those that change no number of parameters."""
    assert (PUBLISHED.eps, PUBLISHED.native, PUBLISHED.registers) == (1e-6, 448, 1)
    assert (PUBLISHED.position_kernel, PUBLISHED.position_antialias) == ("linear", True)
    assert (ENTRY.shape.eps, ENTRY.shape.mlp, ENTRY.shape.length) == (1e-5, "relu", 64)
    assert ENTRY.contrast
