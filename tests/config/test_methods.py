"""Each method of the ML-VPT paper from its config file: trained and frozen parameters, and cost."""

import pytest
from helpers.methods import abstract, assert_frozen_values_stay_and_others_move, counts, on_digits

import mlmoe_jax.config as configuration
from mlmoe_jax.apps.tools.preflight import cost
from mlmoe_jax.config import load_config
from mlmoe_jax.models.backbones.catalog import CATALOG
from mlmoe_jax.runs.assemble import preprocess_for

BACKBONE = 86_580_480  # DINOv2-B

# config -> parameters that train with DINOv2-B and 80 labels (ML-VPT, table 4, to the unit)
PUBLISHED = {
    "finetune": BACKBONE + 61_520,
    "linear_probe": 61_520,
    "vpt": 338_000,
    "gatevpt": 84_571,
    "gatevpt:temperature=true": 84_583,
    "e2vpt": 430_160,
    "gvpt": 399_520,
    "mlvpt_dinov2": 1_022_230,
    "mlvpt_dinov2:backbone=dinov2_vits14": 511_510,
    "mlvpt_dinov2:dataset=voc2007": 653_110,
    "mlvpt_dinov2:dataset=nuswide": 1_028_382,
    "mlvpt_dinov2:dataset=vg256": 2_104_982,
    "mlvpt_vit:backbone=in21k": 1_022_230,
    # by the same formulas
    "vpt:variant=shallow": 84_560,
    "gatevpt:gates=false": 84_560,
    "vpt:project=64": 61_520 + 30 * 12 * 64 + 64 * 768 + 768,
    "e2vpt:shared=false,key_values=5": 430_160,
    "gvpt:sides=co": 10 * 12 * 768 + 61_520,
    "gvpt:sides=dc,per_group=3": 15 * 12 * 768 + 61_520,
    "lora": 294_912 + 61_520,
    "lora:dataset=voc2007,backbone=dinov2_vits14,targets=query+fc1": 12 * 8 * (2 * 384 + 5 * 384) + 385 * 20,
}


LABELS = {"voc2007": 20, "nuswide": 81, "vg256": 256}


@pytest.mark.variants(reference=("gatevpt", "e2vpt", "mlvpt_dinov2", "lora"))
@pytest.mark.parametrize("reference", PUBLISHED)
def test_trainable_parameters_are_those_of_the_paper(reference):
    labels = next((count for name, count in LABELS.items() if name in reference), 80)
    total, trainable = counts(*abstract(reference, labels))
    assert trainable == PUBLISHED[reference]
    if "finetune" in reference:
        assert total == trainable
    elif "backbone" not in reference and "mlvpt_vit" not in reference:
        assert total == BACKBONE + trainable


@pytest.mark.slow
def test_masks_of_e2vpt_count_and_those_that_are_fixed_do_not_train():
    learned = counts(*abstract("e2vpt", overrides=[("model.prompts.pruning", "learned")]))
    assert learned == (BACKBONE + 430_670, 430_670)
    fixed = counts(*abstract("e2vpt", overrides=[("model.prompts.pruning", "fixed")]))
    assert fixed == (BACKBONE + 430_670, 430_160)


@pytest.mark.variants(name=("mlvpt_dinov2",))
@pytest.mark.parametrize("name", ["finetune", "linear_probe", "vpt", "gatevpt", "e2vpt", "gvpt", "mlvpt_dinov2"])
def test_multiply_adds_are_those_of_table_4(name):
    layers = 21_963_611_136 if name in ("finetune", "linear_probe") else 24_513_954_816
    assert cost.published_macs(*abstract(name))[0] == layers


@pytest.mark.slow
def test_what_the_full_count_adds():
    tokens, width, labels = 287, 768, 80
    attention = 12 * 2 * tokens**2 * width
    added = {name: cost.published_macs(*abstract(name))[1] for name in ("vpt", "e2vpt", "gvpt", "mlvpt_dinov2")}
    assert added["vpt"] == attention
    assert added["e2vpt"] == attention + 12 * 2 * tokens * 10 * width
    assert added["gvpt"] == attention + labels * width
    moe = 30 * 2 * width * 5 + 2 * (2 * labels * 3 * width) + labels * width
    assert added["mlvpt_dinov2"] == attention + moe
    by_group = cost.published_macs(*abstract("mlvpt_dinov2", overrides=[("model.head.gates_of", "group")]))[1]
    assert by_group == attention + moe - 2 * (labels - 5) * 3 * width


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vpt", "vpt:variant=shallow", "gatevpt", "e2vpt"])
def test_prompt_methods_can_pool_as_their_authors_do_on_mae(name):
    reference = f"{name}{',' if ':' in name else ':'}backbone=vit_b16_mae"
    assert load_config(reference, []).model.head.pool == "cls"  # as in the comparison of the ML-VPT paper
    config, model = abstract(f"{reference},pool=mean")
    assert model.head.read == ("mean",)
    assert model.final_norm
    assert counts(config, model) == counts(*abstract(reference))


# ------------------------------------------------------------------------------------------------ two steps of each
METHODS = (
    "linear_probe",
    "finetune",
    "vpt",
    "gatevpt:gate_init=1,temperature=true",
    "e2vpt:key_values=2",
    "lora:targets=query+fc2,prompts=2",
    "mlvpt_dinov2",
)
# of others, with --all
VARIANTS = (
    "dora:targets=query+fc2,prompts=2",
    "bitfit",
    "ssf:prompts=2",
    "adaptformer",
    "vpt:dropout=0.5,project=8",
    "vpt:variant=shallow",
    "gatevpt:gate_init=1,pool=mean",
    "e2vpt:key_values=2,shared=false",
    "gvpt",
    "gvpt:sides=dc",
    "mlvpt_dinov2:preset=paper",
)


@pytest.mark.variants(reference=("mlvpt_dinov2",))
@pytest.mark.usefixtures("tiny_vit")
@pytest.mark.parametrize("reference", [*METHODS, *(pytest.param(one, marks=pytest.mark.slow) for one in VARIANTS)])
def test_frozen_values_stay_and_all_others_move(reference, two_steps):
    before, after, _ = two_steps(on_digits(reference))
    assert (reference == "finetune") == (not before.frozen)
    rests = {"head/co/gate/bias", "head/dc/gate/bias"} if reference == "mlvpt_dinov2" else set()  # the code's own
    assert_frozen_values_stay_and_others_move(before, after, biases=True, rests=rests)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_vit")
@pytest.mark.parametrize("reference", ["mlvpt_dinov2", "mlmoe_dinov2"])
def test_adapters_learn_beside_group_prompts_and_experts(reference, two_steps):
    config = on_digits(reference)
    for name in ("lora", "dora", "bitfit", "ssf", "adaptformer"):
        configuration.use_adapter(config, name)
    before, after, _ = two_steps(config)
    adapters = {path.split("/")[1] for path in before.trainable if path.startswith("adapters/")}
    assert adapters == {"lora", "dora", "bitfit", "ssf", "adaptformer"}
    assert_frozen_values_stay_and_others_move(before, after)


@pytest.mark.parametrize(
    "name", ["dinov3_vitb16", "siglip2_vitb16_224", "clip_vitb16", "openclip_vitl14_laion2b", "tipsv2_vitb14"]
)
def test_backbones_that_the_papers_do_not_have_get_the_images_that_they_were_trained_with(name):
    entry = CATALOG[name]
    for method in ("mlvpt_dinov3", "linear_probe", "vpt", "mlmoe_dinov3", "q2l_resnet101"):
        config = load_config(f"{method}:backbone={name},resolution=224", [])
        configuration.validate(config)
        preprocess = preprocess_for(config)
        assert (preprocess.mean, preprocess.std) == (entry.mean, entry.std)


def test_configs_for_dinov3_differ_from_those_for_dinov2_in_the_backbone_only():
    for name in ("mlvpt_dinov3", "mlmoe_dinov3"):
        ours, theirs = (load_config(f"{name[:-1]}{version}:root=x", []) for version in (3, 2))
        ours.model.backbone, theirs.model.backbone = None, None
        assert ours == theirs
