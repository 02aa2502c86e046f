"""The methods that read a feature map, from their config files: counts, costs, trained parameters and penalties."""

import jax
import numpy as np
import pytest
from flax import nnx

import mlmoe_jax.config as configuration
from mlmoe_jax.apps.tools.preflight import cost
from mlmoe_jax.config import load_config
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.models.build import build_model, reads_final_norm
from mlmoe_jax.models.params import ModelDef, split_trainable
from mlmoe_jax.runs.assemble import trainable_rules

METHODS = [
    "q2l_resnet101",
    "ml_decoder_resnet101",
    "drmoe_resnet101",
    "hsq_resnet101",
    "mlgcn_resnet101",
    "addgcn_resnet101",
    "cnn_rnn_resnet101",
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
}


def abstract(reference, labels, overrides=()):
    config = load_config(reference, list(overrides))
    configuration.validate(config)
    space = synthetic_label_space(labels, config.model.prompts.num_groups)
    return config, nnx.eval_shape(lambda: build_model(config, space, rngs=nnx.Rngs(0)))


def counts(config, model):
    _, params, _ = ModelDef.split(model)
    trainable, _ = split_trainable(params, trainable_rules(config))
    return sum(p.size for p in params.values()), sum(p.size for p in trainable.values())


@pytest.mark.parametrize("reference", COUNTS)
def test_parameters_are_those_of_the_papers(reference):
    labels, total, trainable = COUNTS[reference]
    assert counts(*abstract(reference, labels)) == (total, trainable)


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


def test_twenty_thousand_labels_own_their_numbers_and_no_more():
    """A query of 256, an expert from 256 to 64, a classifier of 64."""
    few, many = (counts(*abstract("drmoe_20k", labels))[1] for labels in (10_000, 20_000))
    assert many - few == 10_000 * (256 + 256 * 64 + 64 + 64 + 1)


@pytest.mark.parametrize("reference", ["drmoe_20k", "ml_decoder_resnet101"])
def test_nothing_has_the_size_of_all_pairs_of_labels(reference):
    labels = 1_999  # no other size of the model
    _, model = abstract(reference, labels, [("data.image_size", "112"), ("model.backbone.name", "dinov2_vits14")])

    def loss(params, image):
        prediction = definition.merge(params, stats)(image)
        return prediction.logits.sum()

    definition, params, stats = ModelDef.split(model)
    image = jax.ShapeDtypeStruct((2, 112, 112, 3), "float32")
    shapes = [aval.shape for aval in _values(jax.make_jaxpr(jax.grad(loss))(params, image).jaxpr)]
    assert any(labels in shape for shape in shapes)
    assert not [shape for shape in shapes if shape.count(labels) > 1]


def _values(jaxpr):
    """The type of every value in a program and the programs within it."""
    for equation in jaxpr.eqns:
        yield from (variable.aval for variable in equation.outvars)
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from _values(getattr(inner, "jaxpr", inner))


def test_multiply_adds_of_dr_moe():
    config, model = abstract("drmoe_resnet101:preset=literal", 80)
    layers, extra, norms = cost.published_macs(config, model)
    assert norms == 4 * 512 * (2 * 2 * 196 + 2 * 3 * 80 + 80)
    assert layers + extra - norms == 33_615_732_736


@pytest.mark.usefixtures("tiny_vit")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "drmoe_resnet101" else pytest.mark.slow)
        for name in [*METHODS, "mlmoe_dinov2:prompts=false", "drmoe_resnet101:preset=static"]
    ],
)
def test_trained_values_move_and_all_others_stay(name, two_steps):
    name, _, arguments = name.partition(":")
    config = load_config(f"{name}:dataset=digits{',' if arguments else ''}{arguments}", [])
    configuration.validate(config)
    config.model.head.decoder.encoder_layers = min(1, config.model.head.decoder.encoder_layers)
    config.model.head.decoder.decoder_layers = 1  # one layer is like the next
    before, after, metrics = two_steps(config)
    assert before.frozen
    for path, value in before.frozen.items():
        np.testing.assert_array_equal(after.frozen[path], value, err_msg=path)
    # A query of zeros scores all keys alike; biases before a batch norm and of keys have no effect.
    for path, value in before.trainable.items():
        if not path.endswith("bias"):
            assert (np.asarray(after.trainable[path]) != value).any(), path
    penalties = {"cnn_rnn_resnet101": "loss/sequence"} | dict.fromkeys(("drmoe_resnet101", "drmoe_20k"), "loss/entropy")
    assert {key for key in metrics if key not in ("loss", "loss/logits", "gradient_norm")} == (
        {penalties[name]} if name in penalties else set()
    )


@pytest.mark.usefixtures("tiny_vit")
def test_gates_of_dr_moe_depend_on_the_image_and_static_ones_do_not(drawn_parts):
    images = np.random.default_rng(0).normal(size=(3, 64, 64, 3)).astype(np.float32)
    for arguments, differ in (("", True), (",preset=static", False)):
        config = load_config(f"drmoe_resnet101:dataset=digits{arguments}", [])
        config.model.head.decoder.encoder_layers = config.model.head.decoder.decoder_layers = 1
        parts = drawn_parts(config, synthetic_label_space(4, 2))
        model = parts.definition.merge(parts.trainable, parts.frozen, parts.stats)
        gates = jax.jit(lambda model: model(images).gates["experts"])(model)
        assert gates.shape == (3 if differ else 1, 4, 5)
        assert bool(np.ptp(np.asarray(gates), axis=0).max() > 1e-4) == differ


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("backbone", ["dinov2_vits14", pytest.param("convnext_tiny", marks=pytest.mark.slow)])
def test_every_method_takes_other_backbones(name, backbone):
    if name == "mlmoe_dinov2" and backbone == "convnext_tiny":
        pytest.skip("group prompts need a ViT")
    config, model = abstract(f"{name}:backbone={backbone},resolution=224", 80)
    _, params, _ = ModelDef.split(model)
    trainable, _ = split_trainable(params, trainable_rules(config))
    learns = any(path.startswith("backbone/") for path in trainable)
    assert learns == (backbone == "convnext_tiny" and name != "cnn_rnn_resnet101"), "a CNN is tuned, as published"
    assert any(path.startswith("head/") for path in trainable)


def test_twenty_thousand_labels_need_nothing_of_their_square():
    overrides = [("model.head.decoder.width", "64"), ("model.head.decoder.hidden", "64")]
    config, model = abstract("ml_decoder_resnet101", 20_000, overrides)
    _, params, _ = ModelDef.split(model)
    assert params["head/decoder/queries"].shape == (100, 64)
    assert max(p.size for path, p in params.items() if path.startswith("head/")) < 20_000 * 64 * 2
    assert config.model.head.decoder.style == "ml_decoder"


def test_fixed_queries_do_not_learn_in_any_head_or_under_any_rules():
    for reference, fixed in (("ml_decoder_resnet101", True), ("q2l_resnet101", False)):
        config = load_config(reference, [])
        config.trainable = ((r"", True),)
        rules = trainable_rules(config)
        assert ((r"^head/decoder/queries$", False) in rules) == fixed


def test_only_prompts_are_read_before_the_last_norm():
    settings = load_config("vpt:backbone=vit_b16_in21k", []).model.backbone
    assert reads_final_norm(settings, prompts=False)
    assert not reads_final_norm(settings, prompts=True)
    settings.final_norm = "no"
    assert not reads_final_norm(settings, prompts=False)
    assert reads_final_norm(load_config("mlvpt_dinov2", []).model.backbone, prompts=True)


@pytest.mark.parametrize(
    ("reference", "overrides", "complaint"),
    [
        ("hsq_resnet101:task=0,shared=0", {}, "a label needs an expert"),
        ("drmoe_resnet101", {"model.head.decoder.queries": "5"}, "routed_experts has one query per label"),
        ("vpt", {"model.prompts.count": "0"}, "set model.prompts.kind=none"),
    ],
)
def test_settings_that_do_nothing_or_cannot_work_are_named(reference, overrides, complaint, refusal):
    assert complaint in refusal(configuration.validate, load_config(reference, list(overrides.items())))


def test_the_printed_sign_warns():
    (warning,) = configuration.warnings(load_config("drmoe_resnet101:preset=literal", []))
    assert "drives each gate to one expert" in warning
    assert not configuration.warnings(load_config("drmoe_resnet101", []))
    assert not configuration.warnings(load_config("q2l_resnet101", []))


@pytest.mark.parametrize(
    ("reference", "complaint"),
    [
        ("drmoe_resnet101:preset=best", "preset=best is not one of recommended, literal, static, hsq, honest"),
        ("q2l_resnet101:tune=perhaps", "tune=perhaps is not one of auto, yes, no"),
        ("mlgcn_resnet101:schedule=mine", "schedule=mine is not one of code, paper"),
    ],
)
def test_wrong_arguments_are_named(reference, complaint, refusal):
    assert refusal(load_config, reference, []) == complaint


def test_published_recipes():
    q2l = load_config("q2l_resnet101", [])
    assert (q2l.optim.name, q2l.optim.learning_rate, q2l.train.epochs, q2l.ema.decay) == ("adamw", 1e-4, 80, 0.9997)
    assert (q2l.loss.kind, q2l.loss.scale) == ("asymmetric", 1000.0)
    for name in ("q2l_resnet101", "hsq_resnet101"):  # HSQ is rebuilt after Query2Label
        assert load_config(name, []).data.keep_empty
        assert not load_config(f"{name}:dataset=vg256", []).data.keep_empty, "its split has no empty images"
    drmoe = load_config("drmoe_resnet101", [])
    assert (drmoe.optim.name, drmoe.optim.weight_decay, drmoe.optim.milestones) == ("adam", 1e-5, (0.6, 0.8))
    assert load_config("drmoe_resnet101:dataset=voc2007", []).train.batch_size == 16
    assert (drmoe.augment.contrast, drmoe.augment.hue, drmoe.augment.jitter_order) == (0.4, 0.1, "random")
    gcn = load_config("mlgcn_resnet101", [])
    assert (gcn.optim.name, gcn.optim.learning_rate, gcn.optim.clip_norm) == ("sgd", 0.1, 10.0)
    assert gcn.optim.rate_rules == ((r"^backbone/", 0.1),)
    assert load_config("addgcn_resnet101", []).augment.margin == 64
    for name in ("mlgcn_resnet101", "addgcn_resnet101"):
        data = load_config(f"{name}:dataset=voc2007", []).data
        assert (data.difficult_train, data.difficult_eval) == ("positive", "ignore")
    ml_decoder = load_config("ml_decoder_resnet101", [])
    assert (ml_decoder.loss.gamma_neg, ml_decoder.loss.clip, ml_decoder.loss.reduce) == (4.0, 0.05, "sum")
    assert (ml_decoder.augment.randaugment, ml_decoder.augment.cutout) == ("uda", 0.5)
