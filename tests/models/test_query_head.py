"""Q2L and ML-Decoder against twins built from torch.nn, loaded under the names of the authors' code."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.drawn import drawn
from helpers.layouts import load_as
from helpers.paths import PARITY
from helpers.query_heads import decoder_settings, ml_decoder_head, q2l_head
from helpers.twins import error
from safetensors.numpy import save_file

from mlmoe_jax.models.heads.query import QueryHead
from mlmoe_jax.models.outputs import Features
from mlmoe_jax.models.params import ModelDef, split_trainable
from mlmoe_jax.models.query_decoder import FIXED_QUERIES, QueryDecoder
from mlmoe_jax.pretrained.rules.head_names import ML_DECODER_HEAD, Q2L_LAYOUT

D, HIDDEN, K, GRID = 16, 24, 6, (3, 5)
ARRAYS = np.load(PARITY / "query.npz")


# The twins have no backbone.
HEAD_ALONE = dataclasses.replace(
    Q2L_LAYOUT, rules=tuple(rule for rule in Q2L_LAYOUT.rules if rule.target.startswith("head/"))
)


class Whole(nnx.Module):
    """A module with a head, under the paths of the rules."""

    def __init__(self, head):
        self.head = head


def q2l(channels=D, **options):
    return q2l_head(channels, K, width=D, hidden=HIDDEN, rngs=nnx.Rngs(0), **options)


def as_torch_wires_it(**options):
    decoder = QueryDecoder(20, K, decoder_settings(width=D, heads=4, hidden=HIDDEN, **options), rngs=nnx.Rngs(0))
    return QueryHead(decoder, K, rngs=nnx.Rngs(0))


def ml_decoder(labels, groups, **options):
    return ml_decoder_head(20, labels, groups=groups, width=D, hidden=HIDDEN, rngs=nnx.Rngs(0), **options)


HEADS = {
    "q2l": q2l,
    "q2l_projection": functools.partial(q2l, 20),
    "q2l_self_attention": functools.partial(q2l, style="q2l_self_attention"),
    "torch": as_torch_wires_it,
    "ml_decoder": functools.partial(ml_decoder, K, 100),
    "ml_decoder_grouped": functools.partial(ml_decoder, 7, 3),
}


def loaded(case, folder, **options):
    """Return the head of a case with the weights of the twin."""
    prefix = f"{case}/weights/"
    tensors = {n.removeprefix(prefix): ARRAYS[n].astype(np.float32) for n in ARRAYS.files if n.startswith(prefix)}
    save_file(tensors, folder / "twin.safetensors")
    whole = nnx.eval_shape(lambda: Whole(HEADS[case](**options)))
    load_as(ML_DECODER_HEAD if "ml_decoder" in case else HEAD_ALONE, whole, folder / "twin.safetensors")
    return whole.head


def features(case):
    maps = ARRAYS[f"{case}/features"]
    return Features(None, None, jnp.asarray(maps.reshape(*maps.shape[:2], -1).transpose(0, 2, 1)), GRID)


@pytest.mark.variants(case=("q2l_self_attention", "ml_decoder_grouped"))
@pytest.mark.parametrize("case", HEADS)
def test_equals_torch(case, tmp_path):
    head = loaded(case, tmp_path)
    assert error(jax.jit(head)(features(case)).logits, ARRAYS[f"{case}/logits"]) < 2e-5
    if case == "torch":
        memory, _ = head.decoder.encode(features(case).patches, GRID)
        masked = head.classifier(head.decoder.decode(memory, mask=ARRAYS["visible"]))
        assert error(masked, ARRAYS["torch/masked_logits"]) < 2e-5


@pytest.mark.variants(case=("q2l",))
@pytest.mark.parametrize("case", ["torch", "q2l", "ml_decoder_grouped"])
def test_gradients_equal_those_of_torch(case, tmp_path):
    definition, params, _ = ModelDef.split(loaded(case, tmp_path))
    target = ARRAYS[f"{case}/target"]

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def gradients(params, tokens):
        return (definition.merge(params)(Features(None, None, tokens, GRID)).logits * target).sum()

    by_params, by_tokens = gradients(params, features(case).patches)
    theirs = ARRAYS[f"{case}/gradient/features"]
    assert error(by_tokens, theirs.reshape(*theirs.shape[:2], -1).transpose(0, 2, 1)) < 2e-5
    kernel = by_params["decoder/layers/0/cross_attn/qkv/kernel"]
    assert error(kernel.T, ARRAYS[f"{case}/gradient/in_proj_weight"]) < 2e-5
    moved = np.abs(np.asarray(by_params["decoder/queries"])).max()
    assert (moved == 0) == ("ml_decoder" in case), "only ML-Decoder's queries are fixed"
    assert all(np.isfinite(value).all() for value in by_params.values())


def test_the_linear_path_is_added_to_the_logits_and_starts_at_zero():
    draw = np.random.default_rng(0)
    given = Features(None, None, draw.normal(size=(2, 15, D)).astype(np.float32), GRID)
    kernel, bias = draw.normal(size=(D, K)).astype(np.float32), draw.normal(size=K).astype(np.float32)

    sizes = {"width": D, "heads": 4, "hidden": HIDDEN, "encoder_layers": 0, "decoder_layers": 1}
    decoder = drawn(lambda: QueryDecoder(D, K, decoder_settings(**sizes), rngs=nnx.Rngs(0)), 0.3)
    plain, head = (QueryHead(decoder, K, pooled=pooled, rngs=nnx.Rngs(1)) for pooled in (0, D))
    head.classifier = plain.classifier
    expected, at_first = jax.jit(lambda: (plain(given).logits, head(given).logits))()
    np.testing.assert_array_equal(at_first, expected)
    head.pooled.kernel[...], head.pooled.bias[...] = kernel, bias
    added = jax.jit(lambda: head(given).logits)() - expected
    np.testing.assert_allclose(added, given.patches.mean(axis=1) @ kernel + bias, atol=1e-5)
    assert head.published_macs(15, 0)[0] - plain.published_macs(15, 0)[0] == D * K


def parameters(make):
    """Return the parameters of a model without values: their counts and shapes."""
    return ModelDef.split(nnx.eval_shape(make))[1]


def count(params) -> int:
    return sum(int(np.prod(value.shape)) for value in params.values())


def test_ml_decoder_has_the_published_size():
    params = parameters(lambda: Whole(ml_decoder_head(2048, 80, rngs=nnx.Rngs(0))))
    learned, frozen = split_trainable(params, (FIXED_QUERIES, (r"", True)))
    assert list(frozen) == ["head/decoder/queries"]
    assert count(frozen) == 61_440
    assert count(learned) == 7_150_672
    head = nnx.eval_shape(lambda: ml_decoder_head(2048, 20_000, rngs=nnx.Rngs(0)))
    assert head.decoder.queries.shape == (100, 768)
    assert head.classifier.kernel.shape == (100, 768, 200)
    assert (
        nnx.eval_shape(lambda: ml_decoder_head(2048, 81, groups=80, rngs=nnx.Rngs(0))).classifier.kernel.shape[2] == 2
    )
