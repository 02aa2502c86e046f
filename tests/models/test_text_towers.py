"""Text towers, from published files to vectors, against transformers; inference/test_text_encoder.py has scores."""

import json
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
from helpers.text_towers import arrays_of, small_entry, weights_file
from helpers.twins import below, error, parameters

from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.layers.transformer import MLPS
from mlmoe_jax.models.params import named_variables
from mlmoe_jax.models.text.catalog import TEXT_CATALOG, text_entry
from mlmoe_jax.pretrained.load import apply_rules, recognize
from mlmoe_jax.pretrained.rules.text_names import TEXT_LAYOUTS
from mlmoe_jax.pretrained.text_towers import load_text_tower
from tools.parity import text_towers as twins

TOLERANCE = 2e-5


@pytest.fixture(autouse=True, scope="module")
def exact_products():
    with jax.default_matmul_precision("highest"):
        yield


def loaded(folder: Path, name: str):
    """The tower of a twin, the arrays of the twin, and its texts in the numbers of the tower."""
    arrays = arrays_of(name)
    tower, tokens = load_text_tower(small_entry(name).shape, weights_file(folder, name), arrays["tokens"])
    return tower, arrays, tokens


@jax.jit
def vectors_of(tower, tokens, valid):
    return tower(tokens, valid)


# As published: CLIP's notebook on ImageNet (imagenet_templates of Tip-Adapter), TCL_PROMPTS of TIPS' notebook, and the
# page of SigLIP 2 in transformers.
TEMPLATES = {
    "clip_": "itap of a {}. a bad photo of the {}. a origami {}. a photo of the large {}. a {} in a video game. "
    "art of the {}. a photo of the small {}.",
    "siglip2_": "This is a photo of {}.",
    "tipsv2_": "itap of a {}. a bad photo of a {}. a origami {}. a photo of the large {}. a {} in a video game. "
    "art of the {}. a photo of the small {}. a photo of many {}. a photo of {}s.",
}


def test_names_are_put_into_the_published_templates():
    for backbone in TEXT_CATALOG:
        (published,) = (texts for begin, texts in TEMPLATES.items() if backbone.removeprefix("open").startswith(begin))
        assert " ".join(text_entry(backbone).templates) == published, backbone


# ------------------------------------------------------------------------------------------------- against transformers
@pytest.mark.parametrize("name", twins.TOWERS)
def test_vectors_are_those_of_transformers(tmp_path, name):
    """Blank texts and one that was cut are among them."""
    tower, arrays, tokens = loaded(tmp_path, name)
    vectors = vectors_of(tower, tokens, arrays["valid"])
    assert error(vectors, arrays["vectors"]) < TOLERANCE


@pytest.mark.variants("name")
@pytest.mark.parametrize("name", twins.TOWERS)
def test_gradients_are_those_of_transformers(tmp_path, name):
    tower, arrays, tokens = loaded(tmp_path, name)
    definition, state = nnx.split(tower)
    weights = twins.weighted(arrays["vectors"].shape[1])

    def number(state):
        return jnp.sum(nnx.merge(definition, state)(tokens, arrays["valid"]) @ weights)

    found = nnx.to_flat_state(jax.jit(jax.grad(number))(state))
    ours = {"/".join(map(str, path)): variable[...] for path, variable in found}
    layout = next(layout for layout in TEXT_LAYOUTS if layout.name.startswith(f"hugging_face_{name[:4]}"))
    key = "text_model.encoder.layers.0.self_attn.q_proj.weight"
    theirs = below(arrays, "gradient/")
    query = theirs.pop(key)
    assert error(ours["blocks/0/attn/qkv/kernel"][:, : len(query)], query.T) < 1e-4
    rows = np.unique(arrays["tokens"])
    for path, reference in apply_rules(Path(name), theirs, layout).values.items():
        others = np.delete(reference, rows, axis=0) if path == "token_embed" else np.zeros(1)
        assert not others.any()
        assert error(ours[path], reference[rows] if path == "token_embed" else reference) < 1e-4


SMALL = ("clip_vitb16", "siglip2_vitb16_224")


@pytest.mark.parametrize(
    "backbone", [pytest.param(n, marks=() if n in SMALL else pytest.mark.slow) for n in twins.FULL]
)
def test_names_and_parameters_are_those_of_the_source(backbone):
    source = json.loads((PARITY / "text_towers.json").read_text())[backbone]
    shape = text_entry(backbone).shape
    variables = named_variables(nnx.eval_shape(lambda: replace(shape, depth=1).build(rngs=nnx.Rngs(0))), nnx.Param)
    ours = {path: variable.shape for path, (_, variable) in variables.items() if "similarity" not in path}
    assert parameters(ours, shape.depth) == source["parameters"]
    tensors = {key.replace("*", "0"): np.broadcast_to(np.float32(0), sizes) for key, sizes in source["tensors"].items()}
    mapped = apply_rules(Path(backbone), tensors, recognize(tensors, TEXT_LAYOUTS))
    assert {path: value.shape for path, value in mapped.values.items()} == ours
    assert not mapped.unused


# -------------------------------------------------------------------------------------------------------------- files
def openclip(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors of CLIP in transformers under the names of OpenCLIP."""
    tensors = dict(tensors)
    joined = {}
    for tower in ("text_model", "vision_model"):
        for index in range(twins.SIZES["depth"] if tower == "text_model" else 1):
            layer = f"{tower}.encoder.layers.{index}.self_attn"
            for kind in ("weight", "bias"):
                parts = [tensors.pop(f"{layer}.{part}_proj.{kind}") for part in "qkv"]
                joined[f"{layer}.in_proj_{kind}"] = np.concatenate(parts)
    names = (
        (r"encoder\.layers\.(\d+)\.self_attn", r"transformer.resblocks.\1.attn"),
        (r"encoder\.layers\.(\d+)\.layer_norm", r"transformer.resblocks.\1.ln_"),
        (r"encoder\.layers\.(\d+)\.mlp\.fc1", r"transformer.resblocks.\1.mlp.c_fc"),
        (r"encoder\.layers\.(\d+)\.mlp\.fc2", r"transformer.resblocks.\1.mlp.c_proj"),
        (r"embeddings\.token_embedding", "token_embedding"),
        (r"embeddings\.position_embedding\.weight", "positional_embedding"),
        (r"embeddings\.class_embedding", "class_embedding"),
        (r"embeddings\.patch_embedding", "conv1"),
        (r"pre_layrnorm", "ln_pre"),
        (r"post_layernorm", "ln_post"),
        (r"final_layer_norm", "ln_final"),
        (r"^text_projection\.weight", "text_projection"),
        (r"^visual_projection\.weight", "visual.proj"),
        (r"^vision_model\.", "visual."),
        (r"^text_model\.", ""),
    )
    turned = ("text_projection", "visual.proj")
    return {name: x.T if name in turned else x for name, x in renamed(tensors | joined, *names).items()}


@pytest.mark.parametrize(("suffix", "wrapper"), [("safetensors", ""), ("npz", ""), ("safetensors", "module.")])
def test_openclip_files_have_the_same_tower(tmp_path, suffix, wrapper):
    tower, arrays, tokens = loaded(tmp_path, "clip_gelu")
    tensors = openclip(below(arrays, "weights/"))
    path = write(tmp_path / f"open_clip_model.{suffix}", {f"{wrapper}{key}": x for key, x in tensors.items()})
    other, again = load_text_tower(small_entry("clip_gelu").shape, path, arrays["tokens"])
    np.testing.assert_array_equal(again, tokens)
    for ours, theirs in zip(*(jax.tree.leaves(nnx.state(x)) for x in (other, tower)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_tower_has_only_the_rows_of_the_tokens_that_occur(tmp_path):
    tower, arrays, tokens = loaded(tmp_path, "siglip2")
    rows = np.unique(arrays["tokens"])
    assert tower.token_embed.shape == (len(rows), 16)
    assert len(rows) < twins.VOCABULARY / 2
    np.testing.assert_array_equal(rows[tokens], arrays["tokens"])
    whole = arrays["weights/text_model.embeddings.token_embedding.weight"].astype(np.float32)
    np.testing.assert_array_equal(tower.token_embed[...], whole[rows])


# --------------------------------------------------------------------------------------------------------------- traps
def test_siglip_needs_all_64_tokens(tmp_path):
    """Padded to the longest text only, the vectors would be others."""
    tower, arrays, tokens = loaded(tmp_path, "siglip2")
    with pytest.raises(ValueError, match="SigLIP reads 64 tokens with padding, not 10"):
        tower(tokens[:, :10], arrays["valid"][:, :10])


def test_clip_ends_at_the_first_end_token(tmp_path):
    """What follows the end token, such as OpenCLIP's padding with 0, changes nothing."""
    tower, arrays, tokens = loaded(tmp_path, "clip_gelu")
    vectors = np.asarray(vectors_of(tower, tokens, arrays["valid"]))
    zeros = np.where(arrays["valid"], tokens, 0)
    assert error(vectors_of(tower, zeros, arrays["valid"]), vectors) < 1e-6


def test_every_family_has_its_activation():
    """The exact GELU in OpenCLIP, Hendrycks' approximation in OpenAI's CLIP, tanh in SigLIP, and ReLU in TIPSv2."""
    kinds = {name: entry.shape.mlp for name, entry in TEXT_CATALOG.items()}
    families = {"clip_": "quick_gelu", "openclip_": "gelu", "siglip2_": "gelu_tanh", "tipsv2_": "relu"}
    for prefix, mlp in families.items():
        assert {kind for name, kind in kinds.items() if name.startswith(prefix)} == {mlp}
    assert set(kinds.values()) <= set(MLPS)


@pytest.mark.parametrize("backbone", TEXT_CATALOG)
def test_a_tower_is_published_with_its_backbone(backbone):
    entry, vision = text_entry(backbone), catalog.entry(backbone)
    assert all("{}" in template for template in entry.templates)
    for published in (entry.weights, entry.tokenizer):
        assert published.license
        assert published.address.endswith(published.name.rpartition("/")[2])
    assert entry.weights == vision.weights or backbone.startswith("tipsv2_")
    folder, _, file = entry.tokenizer.name.partition("/")
    assert re.fullmatch(rf"https://huggingface\.co/\w+/{folder}/resolve/main/{file}", entry.tokenizer.address)
    similarity = nnx.eval_shape(lambda: replace(entry.shape, depth=0).build(rngs=nnx.Rngs(0))).similarity
    width = vision.shape.width
    expected = None if similarity.projection is None else (width, entry.shape.output)
    assert (similarity.projection and similarity.projection.shape) == expected
    assert expected or entry.shape.output == width
