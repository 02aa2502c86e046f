"""Runs and small backbones to export."""

from dataclasses import replace

import jax
import pytest
from helpers import tiny

from mlmoe_jax.models.backbones import catalog


@pytest.fixture(scope="module")
def folders(runs):
    """Runs with linear adapters, a LoRA, a bottleneck beside prompts, without adapters, and without its data set."""
    linear = {"dora": {"rank": 2}, "bitfit": {"targets": ("value", "norm1")}, "ssf": {"targets": ("fc1", "norm2")}}
    prompts = {"model__prompts__kind": "deep", "model__prompts__count": 2}
    changes = {
        "linear": {"adapters": linear},
        "lora": {"adapters": {"lora": {"rank": 2}}},
        "bottleneck": {"adapters": {"adaptformer": {}}, **prompts},
        "plain": {},
        "no data": {"data__name": "csv", "data__root": "/absent"},
    }
    with runs.world():
        yield {name: runs("published", **keys).folder for name, keys in changes.items()}


@pytest.fixture
def small_backbones(monkeypatch):
    tiny.use_vit(monkeypatch)
    entry = catalog.entry("resnet50")
    small = replace(entry.shape, blocks=(1,) * 4, stem=8)
    monkeypatch.setitem(catalog.CATALOG, "resnet50", replace(entry, shape=small))
    precision = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "highest")
    yield
    jax.config.update("jax_default_matmul_precision", precision)
