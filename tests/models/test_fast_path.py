"""The exact fast path of deep prompts against a naive reference: all tokens through all blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mlmoe_jax.models.adapters.groups import MASKS, prompt_groups, prompt_mask
from mlmoe_jax.models.backbones.vit import ViT, ViTShape
from mlmoe_jax.models.contracts import Prompts

SHAPE = ViTShape(width=32, depth=3, heads=4, patch=8, native=32, layer_scale=0.5)
GROUP_OF = prompt_groups(sides=2, groups=2, per_group=2)
P, N = len(GROUP_OF), 16


@pytest.fixture(scope="module")
def vit():
    vit = ViT(SHAPE, rngs=nnx.Rngs(0))
    # random biases and scales, so that every parameter has an effect
    state = nnx.state(vit)
    keys = iter(jax.random.split(jax.random.key(1), 200))
    nnx.update(vit, jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape), state))
    return vit


@pytest.fixture(scope="module")
def image():
    return jax.random.normal(jax.random.key(2), (3, 32, 32, 3))


@pytest.fixture(scope="module")
def tokens():
    return jax.random.normal(jax.random.key(3), (3, 1, P, 32))


def normalized(layer, x):
    centered = x - x.mean(-1, keepdims=True)
    return centered / jnp.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6) * layer.scale[...] + layer.bias[...]


def naive_block(block, x, mask):
    """One textbook block on all tokens; mask bool[T,T]."""
    heads = SHAPE.heads
    qkv = normalized(block.norm1, x) @ block.attn.qkv.kernel[...] + block.attn.qkv.bias[...]
    query, key, value = (part.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2) for part in jnp.split(qkv, 3, -1))
    scores = query @ key.swapaxes(2, 3) / np.sqrt(SHAPE.width / heads)
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    mixed = (weights @ value).swapaxes(1, 2).reshape(x.shape)
    x = x + block.ls1.gamma[...] * (mixed @ block.attn.proj.kernel[...] + block.attn.proj.bias[...])
    y = normalized(block.norm2, x) @ block.mlp.fc1.kernel[...] + block.mlp.fc1.bias[...]
    y = y * 0.5 * (1 + jax.scipy.special.erf(y / np.sqrt(2)))
    return x + block.ls2.gamma[...] * (y @ block.mlp.fc2.kernel[...] + block.mlp.fc2.bias[...])


def naive(vit, image, tokens, mask_kind, masked_blocks=range(SHAPE.depth)):
    """Sequence [cls, prompts, patches]; the prompts' outputs are replaced before every block."""
    x, _ = vit.embed(image)
    among = prompt_mask(mask_kind, GROUP_OF)
    mask = np.ones((1 + P + N, 1 + P + N), bool)
    if among is not None:
        mask[1 : 1 + P, 1 : 1 + P] = among
    x = jnp.concatenate([x[:, :1], jnp.zeros((3, P, 32)), x[:, 1:]], axis=1)
    for i, block in enumerate(vit.blocks):
        x = x.at[:, 1 : 1 + P].set(jnp.broadcast_to(tokens[i], (3, P, 32)))
        x = naive_block(block, x, mask if i in masked_blocks else np.ones_like(mask))
    mean, x = normalized(vit.norm, x[:, 1:].mean(1)), normalized(vit.norm, x)
    return {"cls": x[:, 0], "prompts": x[:, 1 : 1 + P], "patches": x[:, 1 + P :], "mean": mean}


@pytest.fixture(scope="module")
def references(vit, image, tokens):
    return {mask: jax.jit(naive, static_argnums=3)(vit, image, tokens, mask) for mask in MASKS}


def difference(ours, theirs):
    return float(jnp.abs(ours - theirs).max() / jnp.abs(theirs).max())


READS = [("prompts",), ("cls",), ("patches",), ("mean",), ("cls", "prompts"), ("cls", "patches"), ("cls", "mean")]
READS += [("cls", "prompts", "patches")]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("read", READS, ids="+".join)
def test_equals_naive_reference(vit, image, tokens, references, mask, read):
    prompts = Prompts(tokens, prompt_mask(mask, GROUP_OF))
    features = vit(image, prompts, read=read)
    assert features.grid == (4, 4)
    for name in ("cls", "prompts", "patches", "mean"):
        if name in read:
            assert difference(getattr(features, name), references[mask][name]) < 2e-6
        else:
            assert getattr(features, name) is None


@pytest.mark.parametrize("mask", MASKS)
def test_gradients_of_prompts_equal_naive_reference(vit, image, tokens, mask):
    target = jax.random.normal(jax.random.key(4), (3, P, 32))

    def fast(tokens):
        features = vit(image, Prompts(tokens, prompt_mask(mask, GROUP_OF)), read=("prompts",))
        return jnp.mean((features.prompts - target) ** 2)

    def slow(tokens):
        return jnp.mean((naive(vit, image, tokens, mask)["prompts"] - target) ** 2)

    ours, theirs = jax.jit(jax.grad(fast))(tokens), jax.jit(jax.grad(slow))(tokens)
    assert all(jnp.abs(theirs[block]).max() > 1e-4 for block in range(3)), "every block's prompts have an effect"
    assert difference(ours, theirs) < 1e-5


def test_prompts_that_differ_per_image_take_the_same_path(vit, image, tokens):
    """With prompt dropout, prompts differ per image: the second axis is B."""
    own = tokens * jnp.array([1.0, 0.5, 2.0])[None, :, None, None]
    together = vit(image, Prompts(own, None), read=("prompts",)).prompts
    for row in range(3):
        alone = vit(image[row : row + 1], Prompts(own[:, row : row + 1], None), read=("prompts",)).prompts
        assert difference(together[row : row + 1], alone) < 2e-6


def test_mask_matters_in_the_last_block_only(vit, image, tokens):
    everywhere = naive(vit, image, tokens, "all_prompts")["prompts"]
    only_last = naive(vit, image, tokens, "all_prompts", masked_blocks=[2])["prompts"]
    but_last = naive(vit, image, tokens, "all_prompts", masked_blocks=[0, 1])["prompts"]
    assert difference(only_last, everywhere) < 2e-6
    assert difference(but_last, everywhere) > 1e-3


def test_without_prompts_is_the_plain_vit(vit, image):
    none = jnp.zeros((3, 1, 0, 32))
    empty = vit(image, Prompts(none), read=("cls", "patches", "mean"))
    plain = vit(image, read=("cls", "patches", "mean"))
    assert difference(empty.cls, plain.cls) < 2e-6
    assert difference(empty.patches, plain.patches) < 2e-6
    assert difference(empty.mean, plain.mean) < 2e-6
    before_the_norm = vit(image, read=("patches",), norm=False).patches.mean(1)
    assert difference(plain.mean, normalized(vit.norm, before_the_norm)) < 2e-6


def test_prompts_that_are_absent_do_not_count_in_the_mean(vit, image, tokens):
    present = jnp.array([True, False] * (P // 2))
    fewer = vit(image, Prompts(tokens[:, :, ::2]), read=("mean",)).mean
    assert difference(vit(image, Prompts(tokens, present=present), read=("mean",)).mean, fewer) < 2e-6


def test_a_mean_alone_has_no_attention_maps(vit, image, tokens):
    assert vit(image, Prompts(tokens), read=("mean",), return_attention=True).attention == {}
    both = vit(image, Prompts(tokens), read=("cls", "mean"), return_attention=True).attention
    alone = vit(image, Prompts(tokens), read=("cls",), return_attention=True).attention
    assert both.keys() == alone.keys() == {"cls"}
    assert difference(both["cls"], alone["cls"]) < 2e-6


def test_fast_path_needs_fewer_operations(vit, image, tokens):
    def flops(function):
        return jax.jit(function).lower(tokens).compile().cost_analysis()["flops"]

    fast = flops(lambda t: vit(image, Prompts(t), read=("prompts",)).prompts)
    slow = flops(lambda t: naive(vit, image, t, "none")["prompts"])
    assert fast < 0.75 * slow


def test_mistakes_are_refused(vit, image, tokens):
    with pytest.raises(ValueError, match="without prompts"):
        vit(image, read=("prompts",))
    with pytest.raises(ValueError, match="cannot read"):
        vit(image, read=("pixels",))
    with pytest.raises(ValueError, match="not a multiple of the patch size 8"):
        vit(image[:, :30], read=("cls",))
