"""Every method that works on a ViT, on a tiny model of each further family: gradient steps from its config."""

from dataclasses import replace

import pytest
from helpers.methods import assert_frozen_values_stay_and_others_move, on_digits

from mlmoe_jax.models.backbones import catalog

FAMILIES = ("dinov3_vits16plus", "siglip2_vitb16_224", "clip_vitb16", "tipsv2_vitg14")
METHODS = (
    "linear_probe",
    "vpt",
    "vpt:variant=shallow",
    "gatevpt:gate_init=1,temperature=true",
    "e2vpt:key_values=2",
    "gvpt",
    "mlvpt_dinov3",
    "mlmoe_dinov3",
    "q2l_resnet101",
    "ml_decoder_resnet101",
    "drmoe_resnet101",
)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("reference", METHODS)
def test_frozen_values_stay_and_all_others_move(family, reference, monkeypatch, two_steps):
    published = catalog.entry(family)
    narrow = replace(published.shape, width=16, depth=2, heads=2, patch=32, native=64, mlp_ratio=2.0)
    monkeypatch.setitem(catalog.CATALOG, family, replace(published, shape=narrow))
    before, after, _ = two_steps(on_digits(reference, f"backbone={family}"))
    assert all(path.startswith("backbone/") or "queries" in path for path in before.frozen)
    assert_frozen_values_stay_and_others_move(before, after)
