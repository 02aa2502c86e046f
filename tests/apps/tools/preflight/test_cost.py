import jax
import jax.numpy as jnp
import pytest

from mlmoe_jax.apps.tools.preflight import cost
from mlmoe_jax.config import load_config
from mlmoe_jax.main import main
from mlmoe_jax.models.layers import dispatch


def summary(reference, **overrides):
    return cost.count_cost(load_config(reference, [(key.replace("__", "."), str(v)) for key, v in overrides.items()]))


@pytest.fixture(scope="module")
def ml_vpt():
    return summary("mlvpt_dinov2", eval__batch_size=64)


@pytest.fixture(scope="module")
def probe():
    return summary("linear_probe:dataset=coco2014", eval__batch_size=64)


# -------------------------------------------------------------------------------- the figures of the ML-VPT paper
def test_parameters_and_macs_as_the_papers_count(ml_vpt, probe):
    assert ml_vpt["params"] == {"total": 87_602_710, "trainable": 1_022_230, "backbone": 86_580_480}
    assert probe["macs"]["layers"] == 21_963_611_136
    assert ml_vpt["macs"]["layers"] == 24_513_954_816
    norms = 25 * 4 * 768
    assert probe["macs"]["full"] - probe["macs"]["products"] == 257 * norms
    assert ml_vpt["macs"]["full"] - ml_vpt["macs"]["products"] == 287 * norms
    assert round(probe["macs"]["products"] / 1e9, 2) == 23.16
    assert round(ml_vpt["macs"]["products"] / 1e9, 2) == 26.01
    # In batches of 64, 30 prompts on the fast path cost less than a linear probe with all tokens in all blocks.
    assert ml_vpt["macs"]["executed"] == pytest.approx(21.85e9, rel=1e-3)
    assert probe["macs"]["executed"] < 0.95 * probe["macs"]["full"]


@pytest.mark.slow
def test_macs_of_dr_moe_as_papers_count_and_as_executed():
    """In a batch, the layers of the label queries before the first attention to the image run once."""
    of_448 = summary("drmoe_resnet101:preset=literal,dataset=coco2014")
    assert of_448["macs"] == {
        "layers": 33_431_572_480,
        "full": 33_618_485_248,
        "products": 33_615_732_736,
        "executed": 33_507_803_136,
    }


def test_macs_that_a_kernel_of_the_gpu_executes_are_counted(monkeypatch, probe):
    """On an NVIDIA GPU, attention in bfloat16 is a call of cuDNN, in which no product is seen."""

    def capability() -> tuple[int, ...]:
        return () if jax.config.jax_default_device == "cpu" else (9, 0)

    monkeypatch.setattr(dispatch, "compute_capability", capability)
    of_gpu = summary("linear_probe:dataset=coco2014", eval__batch_size=64, model__dtype="bfloat16")
    assert of_gpu["macs"] == probe["macs"]


def test_the_projection_of_prompts_is_counted(tiny_vit):
    """It maps two prompts in each of two blocks from 4 to 16 channels."""
    plain, projected = (
        summary("vpt:dataset=digits", model__prompts__count=2, model__prompts__project=width) for width in (0, 4)
    )
    assert projected["macs"]["layers"] - plain["macs"]["layers"] == 2 * 2 * 4 * 16


def test_memory_and_modules(ml_vpt):
    assert ml_vpt["memory"]["frozen"] == 4 * 86_580_480
    assert {ml_vpt["memory"][part] for part in ("trainable", "average", "selected")} == {4 * 1_022_230}
    assert ml_vpt["memory"]["optimizer"] == 8 * 1_022_230
    assert sum(total for total, _ in ml_vpt["modules"].values()) == 87_602_710
    assert ml_vpt["modules"]["prompts"] == (276_480, 276_480)


def test_the_printed_memory_is_in_millions_of_bytes(ml_vpt):
    text = cost.cost_outcome({"mlvpt": ml_vpt}).text()
    total = 4 * 86_580_480 + 5 * 4 * 1_022_230  # with values, average, selected values and the moments of Adam
    assert f"{total / 1e6:,.1f}" in text.splitlines()[1]
    assert "frozen 346.3 MB" in text
    assert "optimizer 8.2 MB" in text


@pytest.mark.slow
def test_settings_change_memory_and_macs(probe):
    half = summary("linear_probe:dataset=coco2014", eval__batch_size=64, model__frozen_dtype="bfloat16")
    kernels = 12 * 12 * 768**2 + 3 * 14**2 * 768
    assert half["memory"]["frozen"] == probe["memory"]["frozen"] - 2 * kernels
    sgd = summary("linear_probe:dataset=coco2014", eval__batch_size=64, optim__name="sgd")
    assert sgd["memory"]["optimizer"] == 4 * 61_520 == probe["memory"]["optimizer"] / 2
    both = summary("linear_probe:dataset=coco2014", eval__batch_size=64, model__head__pool="both")
    assert both["macs"]["layers"] == probe["macs"]["layers"] + 256 * 80 * 768


@pytest.mark.slow
def test_macs_of_a_convnext_count_its_norms():
    of_224 = summary("linear_probe:dataset=voc2012,backbone=convnext_tiny", eval__batch_size=1)
    assert of_224["params"]["backbone"] == 27_820_128
    norms = of_224["macs"]["layers"] - of_224["macs"]["executed"]
    assert of_224["macs"]["products"] == of_224["macs"]["executed"]
    positions = {96: 56**2, 192: 28**2, 384: 14**2, 768: 7**2}
    blocks = {96: 3, 192: 3, 384: 9, 768: 3}
    inside = sum(blocks[width] * positions[width] * width for width in positions)
    between = 56**2 * 96 * 2 + 28**2 * 192 + 14**2 * 384 + 768
    assert norms == 4 * (inside + between)


# ----------------------------------------------------------------------------------------------------- counting
def test_dots_and_convolutions_are_counted_in_nested_jaxprs():
    def inner(x):
        return jax.lax.scan(lambda c, _: (jnp.sin(c @ jnp.ones((4, 4))), None), x, length=5)[0]

    jaxpr = jax.make_jaxpr(jax.jit(lambda x: jnp.einsum("bij,bjk->bik", inner(x), x)))(jnp.ones((2, 4, 4)))
    assert cost.count_macs(jaxpr.jaxpr) == 5 * 2 * 4 * 4 * 4 + 2 * 4 * 4 * 4
    image, kernel = jnp.ones((1, 8, 8, 6)), jnp.ones((3, 3, 2, 9))
    grouped = jax.make_jaxpr(
        lambda x, k: jax.lax.conv_general_dilated(
            x, k, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=3
        )
    )(image, kernel)
    assert cost.count_macs(grouped.jaxpr) == 4 * 4 * 9 * (3 * 3 * 2)
    branches = jax.make_jaxpr(lambda p, x: jax.lax.cond(p, lambda y: y @ y, lambda y: y, x))(True, jnp.ones((3, 3)))
    assert cost.count_macs(branches.jaxpr) == 27


# ------------------------------------------------------------------------------------------------ the command
def test_the_table_has_one_row_per_config_and_one_per_module(tiny_vit, capsys):
    assert (
        main(["--mode=summary", "--configs=linear_probe:dataset=digits,mlvpt_digits", "--config.eval.batch_size=1"])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["config", "linear_probe:dataset=digits", "mlvpt_digits"]
    assert any(line.split() == ["head/classifier", "170", "170"] for line in lines)
