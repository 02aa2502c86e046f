"""The fixture of small backbones to export."""

from dataclasses import replace

import jax
import pytest
from helpers import tiny

from mlmoe_jax.models.backbones import catalog


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
