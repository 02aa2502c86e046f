"""Each method from its config file: trained and frozen parameters, and cost."""

import jax
import pytest
from helpers.methods import abstract, assert_frozen_values_stay_and_others_move, counts, on_digits, split
from helpers.programs import equations

import mlmoe_jax.config as configuration
from mlmoe_jax.config import load_config
from mlmoe_jax.models.backbones.catalog import CATALOG
from mlmoe_jax.models.build import reads_final_norm
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.runs.assemble import preprocess_for, trainable_rules

BACKBONE, RESNET = 86_580_480, 42_500_160  # DINOv2-B, ResNet-101

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
    "drmoe_resnet101:backbone=dinov2_vits14": 79_965_216 - RESNET - (2048 - 384) * 512,
    "lora:dataset=voc2007,backbone=dinov2_vits14,targets=query+fc1": 12 * 8 * (2 * 384 + 5 * 384) + 385 * 20,
}
# config -> all parameters and trainable parameters, with ResNet-101, without running statistics and constants
WITH_RESNET = {
    "q2l_resnet101": (193_906_832, 193_579_088),
    "ml_decoder_resnet101": (RESNET + 7_150_672 + 61_440, RESNET + 7_150_672),
    "drmoe_resnet101": (79_965_216, 79_965_216),
    "drmoe_resnet101:preset=literal": (79_944_913, 79_944_913),
    "drmoe_resnet101:preset=literal,dataset=voc2007": (64_077_733, 64_077_733),
    "mlgcn_resnet101": (44_904_512, 44_904_512),
    "addgcn_resnet101": (48_165_344, 48_165_344),
    "pat_resnet101": (RESNET + 3 * 2049 * 80, RESNET + 3 * 2049 * 80),
    "csra_resnet101:heads=6": (RESNET + 6 * 2048 * 80, RESNET + 6 * 2048 * 80),
}
LABELS = {"voc2007": 20, "nuswide": 81, "vg256": 256}


@pytest.mark.variants(reference=("gatevpt", "e2vpt", "mlvpt_dinov2", "lora", "drmoe_resnet101:backbone=dinov2_vits14"))
@pytest.mark.parametrize("reference", [*PUBLISHED, *WITH_RESNET])
def test_parameters_are_those_of_the_papers(reference):
    labels = next((count for name, count in LABELS.items() if name in reference), 80)
    total, trainable = counts(*abstract(reference, labels))
    if reference in WITH_RESNET:
        assert (total, trainable) == WITH_RESNET[reference]
        return
    assert trainable == PUBLISHED[reference]
    if "finetune" in reference:
        assert total == trainable
    elif "backbone" not in reference and "mlvpt_vit" not in reference:
        assert total == BACKBONE + trainable


@pytest.mark.slow
def test_masks_of_e2vpt_count_and_those_that_are_fixed_do_not_train():
    learned = counts(*abstract("e2vpt", overrides=(("model.prompts.pruning", "learned"),)))
    assert learned == (BACKBONE + 430_670, 430_670)
    fixed = counts(*abstract("e2vpt", overrides=(("model.prompts.pruning", "fixed"),)))
    assert fixed == (BACKBONE + 430_670, 430_160)


def published_macs(reference, **settings):
    config, model = abstract(reference, **settings)
    return model.published_macs(config.data.image_size)


@pytest.mark.variants(name=("mlvpt_dinov2",))
@pytest.mark.parametrize("name", ["finetune", "linear_probe", "vpt", "gatevpt", "e2vpt", "gvpt", "mlvpt_dinov2"])
def test_multiply_adds_are_those_of_table_4(name):
    layers = 21_963_611_136 if name in ("finetune", "linear_probe") else 24_513_954_816
    assert published_macs(name)[0] == layers


@pytest.mark.slow
def test_what_the_full_count_adds():
    tokens, width, labels = 287, 768, 80
    attention = 12 * 2 * tokens**2 * width
    added = {name: published_macs(name)[1] for name in ("vpt", "e2vpt", "gvpt", "mlvpt_dinov2")}
    assert added["vpt"] == attention
    assert added["e2vpt"] == attention + 12 * 2 * tokens * 10 * width
    assert added["gvpt"] == attention + labels * width
    moe = 30 * 2 * width * 5 + 2 * (2 * labels * 3 * width) + labels * width
    assert added["mlvpt_dinov2"] == attention + moe
    by_group = published_macs("mlvpt_dinov2", overrides=(("model.head.gates_of", "group"),))[1]
    assert by_group == attention + moe - 2 * (labels - 5) * 3 * width


@pytest.mark.variants("reference")
@pytest.mark.usefixtures("tiny_vit")
@pytest.mark.parametrize("reference", ["drmoe_20k", "ml_decoder_resnet101"])
def test_nothing_has_the_size_of_all_pairs_of_labels(reference):
    labels = 1_999  # no other size of the model
    small = ("data.image_size", "64"), ("model.backbone.name", "vit_digits"), ("model.head.decoder.decoder_layers", "1")
    _, model = abstract(reference, labels, small)

    def loss(params, image):
        prediction = definition.merge(params, stats)(image)
        return prediction.logits.sum()

    definition, params, stats = ModelDef.split(model)
    image = jax.ShapeDtypeStruct((2, 64, 64, 3), "float32")
    program = jax.make_jaxpr(jax.grad(loss))(params, image)
    shapes = [value.aval.shape for equation in equations(program.jaxpr) for value in equation.outvars]
    assert any(labels in shape for shape in shapes)
    assert not [shape for shape in shapes if shape.count(labels) > 1]


# ------------------------------------------------------------------------------------------------ two steps of each
READING_MAPS = (
    "q2l_resnet101",
    "ml_decoder_resnet101",
    "drmoe_resnet101",
    "hsq_resnet101",
    "mlgcn_resnet101",
    "addgcn_resnet101",
    "cnn_rnn_resnet101",
    "csra_resnet101",
    "pat_resnet101",
    "splicemix_resnet101",
    "mlmoe_dinov2",
    "drmoe_20k",
)
METHODS = (
    "linear_probe",
    "finetune",
    "vpt",
    "gatevpt:gate_init=1,temperature=true",
    "e2vpt:key_values=2",
    "lora:targets=query+fc2,prompts=2",
    "mlvpt_dinov2",
    *READING_MAPS,
    "mlmoe_dinov2:prompts=false",
    "drmoe_resnet101:preset=static",
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


PARTS = {  # of the loss, beside that of the logits
    "cnn_rnn_resnet101": {"loss/sequence"},
    "drmoe_resnet101": {"loss/entropy"},
    "drmoe_20k": {"loss/entropy"},
    "pat_resnet101": {"loss/cls", "loss/quarters"},
    "splicemix_resnet101": {"loss/consistency"},
}


@pytest.mark.variants(reference=("mlvpt_dinov2",))
@pytest.mark.usefixtures("tiny_vit")
@pytest.mark.parametrize("reference", METHODS)
def test_frozen_values_stay_and_all_others_move(reference, two_steps):
    before, after, metrics = two_steps(on_digits(reference))
    name = reference.partition(":")[0]
    assert (name == "finetune") == (not before.frozen)
    rests = {"head/co/gate/bias", "head/dc/gate/bias"} if reference == "mlvpt_dinov2" else set()  # the code's own
    biases = name not in READING_MAPS
    assert_frozen_values_stay_and_others_move(before, after, biases=biases, rests=rests)
    if name in READING_MAPS:
        assert set(metrics) - {"loss", "loss/logits", "gradient_norm"} == PARTS.get(name, set())


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


@pytest.mark.slow
@pytest.mark.parametrize("name", READING_MAPS)
@pytest.mark.parametrize("backbone", ["dinov2_vits14", "convnext_tiny"])
def test_every_method_takes_other_backbones(name, backbone):
    if name == "mlmoe_dinov2" and backbone == "convnext_tiny":
        pytest.skip("group prompts need a ViT")
    config, model = abstract(f"{name}:backbone={backbone},resolution=224", 80)
    _, trainable = split(config, model)
    learns = any(path.startswith("backbone/") for path in trainable)
    assert learns == (backbone == "convnext_tiny" and name != "cnn_rnn_resnet101"), "a CNN is tuned, as published"
    assert any(path.startswith("head/") for path in trainable)


def test_fixed_queries_do_not_learn_in_any_head_or_under_any_rules():
    for reference, fixed in (("ml_decoder_resnet101", True), ("q2l_resnet101", False)):
        config = load_config(reference, [])
        config.trainable = ((r"", True),)
        rules = trainable_rules(config)
        assert ((r"^head/decoder/queries$", False) in rules) == fixed


def test_only_prompts_are_read_before_the_last_norm():
    assert reads_final_norm("vit_b16_in21k", prompts=False)
    assert not reads_final_norm("vit_b16_in21k", prompts=True)
    assert reads_final_norm("dinov2_vitb14", prompts=True)


def test_the_printed_sign_warns():
    (warning,) = configuration.find_warnings(load_config("drmoe_resnet101:preset=literal", []))
    assert "drives each gate to one expert" in warning
    assert not configuration.find_warnings(load_config("drmoe_resnet101", []))
    assert not configuration.find_warnings(load_config("q2l_resnet101", []))
