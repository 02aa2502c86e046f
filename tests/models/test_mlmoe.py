import jax.numpy as jnp
import numpy as np
from flax import nnx

from mlmoe_jax.models.adapters.groups import prompt_groups
from mlmoe_jax.models.contracts import PATCHES, PROMPTS, Features
from mlmoe_jax.models.heads.mlmoe import GroupTokenDecoder, own_prompts

CO, DC = [0, 1, 1], [1, 1, 0]
G, M, D, K = 2, 2, 8, 3


def decoder():
    return GroupTokenDecoder(
        D, {"co": CO, "dc": DC}, groups=G, per_group=M, width=D, heads=2, hidden=16, encoder_layers=0,
        decoder_layers=1, style="independent", rngs=nnx.Rngs(0),
    )  # fmt: skip


def test_a_label_owns_the_prompts_of_its_groups_on_both_sides():
    mask = own_prompts({"co": CO, "dc": DC}, G, M)
    of = prompt_groups(2, G, M)
    for k in range(K):
        assert mask[k].tolist() == [group in (CO[k], G + DC[k]) for group in of]
    assert own_prompts({"dc": DC}, G, M)[2].tolist() == [True, False, True, False]


def test_a_label_query_attends_to_all_patches_and_only_its_prompts():
    draw = np.random.default_rng(0)
    patches, prompts = (jnp.asarray(draw.normal(size=(2, n, D)), jnp.float32) for n in (4, 8))
    model = decoder()
    assert model.read == (PROMPTS, PATCHES)

    def found(patches, prompts):
        return np.asarray(model(Features(None, prompts, patches, (2, 2))))

    before, mask = found(patches, prompts), own_prompts({"co": CO, "dc": DC}, G, M)
    for p in range(8):
        changed = np.abs(found(patches, prompts.at[:, p].add(1.0)) - before).max(axis=(0, 2))
        assert ((changed > 1e-5) == mask[:, p]).all()
    assert (np.abs(found(patches.at[:, 3].add(1.0), prompts) - before).max(axis=(0, 2)) > 1e-5).all()


def test_group_tokens_are_counted():
    plain, products = super(GroupTokenDecoder, decoder()).published_macs(4)
    assert decoder().published_macs(4) == (plain + 8 * 2 * D * D, products + 2 * K * 8 * D)
