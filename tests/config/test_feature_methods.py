"""The methods that read a feature map, from their config files: counts, costs, trained parameters and penalties."""

import jax
import pytest
from helpers.methods import abstract, assert_frozen_values_stay_and_others_move, counts, on_digits, split
from helpers.programs import equations

import mlmoe_jax.config as configuration
from mlmoe_jax.apps.tools.preflight import cost
from mlmoe_jax.config import load_config
from mlmoe_jax.models.build import reads_final_norm
from mlmoe_jax.models.params import ModelDef
from mlmoe_jax.runs.assemble import trainable_rules

METHODS = [
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
]

# config -> (labels, all parameters, trainable parameters), with ResNet-101, without running statistics and constants
COUNTS = {
    "q2l_resnet101": (80, 193_906_832, 193_579_088),
    "ml_decoder_resnet101": (80, 42_500_160 + 7_150_672 + 61_440, 42_500_160 + 7_150_672),
    "drmoe_resnet101": (80, 79_965_216, 79_965_216),
    "drmoe_resnet101:preset=literal": (80, 79_944_913, 79_944_913),
    "drmoe_resnet101:preset=literal,dataset=voc2007": (20, 64_077_733, 64_077_733),
    "mlgcn_resnet101": (80, 44_904_512, 44_904_512),
    "addgcn_resnet101": (80, 48_165_344, 48_165_344),
    "pat_resnet101": (80, 42_500_160 + 3 * 2049 * 80, 42_500_160 + 3 * 2049 * 80),
    "csra_resnet101:heads=6": (80, 42_500_160 + 6 * 2048 * 80, 42_500_160 + 6 * 2048 * 80),
}


@pytest.mark.variants(reference=("drmoe_resnet101",))
@pytest.mark.parametrize("reference", COUNTS)
def test_parameters_are_those_of_the_papers(reference):
    labels, total, trainable = COUNTS[reference]
    assert counts(*abstract(reference, labels)) == (total, trainable)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "total"),
    [
        ({"expert": "ffn"}, 90_998_225),
        ({"gate_share": "shared"}, 69_468_486),
    ],
)
def test_variants_of_dr_moe(overrides, total):
    overrides = [(f"model.head.routing.{key}", value) for key, value in overrides.items()]
    assert counts(*abstract("drmoe_resnet101:preset=literal", 80, overrides))[0] == total


@pytest.mark.slow
def test_twenty_thousand_labels_own_their_numbers_and_no_more():
    """A query of 256, an expert from 256 to 64, a classifier of 64."""
    few, many = (counts(*abstract("drmoe_20k", labels))[1] for labels in (10_000, 20_000))
    assert many - few == 10_000 * (256 + 256 * 64 + 64 + 64 + 1)


@pytest.mark.variants("reference")
@pytest.mark.usefixtures("tiny_vit")
@pytest.mark.parametrize("reference", ["drmoe_20k", "ml_decoder_resnet101"])
def test_nothing_has_the_size_of_all_pairs_of_labels(reference):
    labels = 1_999  # no other size of the model
    _, model = abstract(reference, labels, [("data.image_size", "64"), ("model.backbone.name", "vit_digits")])

    def loss(params, image):
        prediction = definition.merge(params, stats)(image)
        return prediction.logits.sum()

    definition, params, stats = ModelDef.split(model)
    image = jax.ShapeDtypeStruct((2, 64, 64, 3), "float32")
    program = jax.make_jaxpr(jax.grad(loss))(params, image)
    shapes = [value.aval.shape for equation in equations(program.jaxpr) for value in equation.outvars]
    assert any(labels in shape for shape in shapes)
    assert not [shape for shape in shapes if shape.count(labels) > 1]


@pytest.mark.slow
def test_multiply_adds_of_dr_moe():
    config, model = abstract("drmoe_resnet101:preset=literal", 80)
    layers, extra, norms = cost.published_macs(config, model)
    assert norms == 4 * 512 * (2 * 2 * 196 + 2 * 3 * 80 + 80)
    assert layers + extra - norms == 33_615_732_736


@pytest.mark.usefixtures("tiny_vit")
@pytest.mark.slow
@pytest.mark.parametrize("name", [*METHODS, "mlmoe_dinov2:prompts=false", "drmoe_resnet101:preset=static"])
def test_trained_values_move_and_all_others_stay(name, two_steps):
    before, after, metrics = two_steps(on_digits(name))
    assert before.frozen
    assert_frozen_values_stay_and_others_move(before, after)
    name = name.partition(":")[0]
    penalties = {"cnn_rnn_resnet101": "loss/sequence"} | dict.fromkeys(("drmoe_resnet101", "drmoe_20k"), "loss/entropy")
    assert {key for key in metrics if key not in ("loss", "loss/logits", "gradient_norm")} == (
        {penalties[name]} if name in penalties else set()
    )


@pytest.mark.variants(name=("drmoe_resnet101",))
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("backbone", ["dinov2_vits14", pytest.param("convnext_tiny", marks=pytest.mark.slow)])
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
