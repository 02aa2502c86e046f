"""Every method that works on a ViT, on a tiny DINOv3, SigLIP 2 and CLIP: forward and gradient steps from its config."""

from dataclasses import replace

import numpy as np
import pytest

import mlmoe_jax.config as configuration
from mlmoe_jax.config import load_config
from mlmoe_jax.models.backbones import catalog

FAMILIES = ("dinov3_vits16plus", "siglip2_vitb16_224", "clip_vitb16")
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
# Without --all, each family with two methods, and each kind of prompts and of what heads read at least once.
QUICK = {
    ("dinov3_vits16plus", "mlvpt_dinov3"),
    ("dinov3_vits16plus", "gatevpt:gate_init=1,temperature=true"),
    ("siglip2_vitb16_224", "vpt"),
    ("siglip2_vitb16_224", "mlmoe_dinov3"),
    ("clip_vitb16", "e2vpt:key_values=2"),
    ("clip_vitb16", "q2l_resnet101"),
}
CASES = [
    pytest.param(family, method, marks=() if (family, method) in QUICK else pytest.mark.slow)
    for family in FAMILIES
    for method in METHODS
]


@pytest.mark.parametrize(("family", "reference"), CASES)
def test_frozen_values_stay_and_all_others_move(family, reference, monkeypatch, two_steps):
    published = catalog.entry(family)
    narrow = replace(published.shape, width=16, depth=2, heads=2, patch=32, native=64, mlp_ratio=2.0)
    monkeypatch.setitem(catalog.CATALOG, family, replace(published, shape=narrow))
    name, _, arguments = reference.partition(":")
    config = load_config(f"{name}:dataset=digits,backbone={family}{',' if arguments else ''}{arguments}", [])
    configuration.validate(config)
    config.model.head.decoder.encoder_layers = min(1, config.model.head.decoder.encoder_layers)
    config.model.head.decoder.decoder_layers = 1
    before, after, _ = two_steps(config)
    assert all(path.startswith("backbone/") or "queries" in path for path in before.frozen)
    for path, value in before.frozen.items():
        np.testing.assert_array_equal(after.frozen[path], value, err_msg=path)
    for path, value in before.trainable.items():
        if not path.endswith("bias"):  # those of the code's gates and of keys have no effect
            assert (np.asarray(after.trainable[path]) != value).any(), path
