"""Mistakes that are found before a training opens its data."""

from pathlib import Path

import pytest
from helpers import tiny

from mlmoe_jax.config import default_config
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.training import initialization, loop

pytestmark = pytest.mark.usefixtures("tiny_vit")


@pytest.fixture
def refused(monkeypatch, refusal, tmp_path):
    """A function that starts a training with some keys, with no data and no folder; returns the sentence."""

    def opened(*_, **__):
        raise AssertionError("the data was opened")

    monkeypatch.setattr(loop, "open_training_data", opened)
    monkeypatch.chdir(tmp_path)

    def start(**keys: str) -> str:
        config = default_config()
        config.model.backbone.weights = "none"
        config.update_from_flattened_dict({name.replace("__", "."): value for name, value in keys.items()})
        sentence = refusal(loop.train, config, RunFolder(tmp_path / "run"))
        assert not (tmp_path / "run").exists()
        return sentence

    return start


def test_an_unknown_metric_is_refused(refused):
    assert "did you mean 'mAP_envelope'" in refused(eval__select_metric="mAP_envelop")


def test_weights_are_read_before_the_data(refused):
    assert refused(model__backbone__weights="none.npz") == "cannot read none.npz: No such file or directory"
    Path("text.safetensors").write_text("not tensors")
    assert refused(model__backbone__weights="text.safetensors").startswith("text.safetensors is damaged: ")
    tiny.write_weights(Path("wide.safetensors"), tiny.entry(width=32))
    assert "does not fit the model" in refused(model__backbone__weights="wide.safetensors")


def test_the_source_of_initial_values_is_read_before_the_data(refused, monkeypatch):
    assert refused(init_from="nothing") == (
        "config.init_from is 'nothing', which is neither a file of weights nor a run folder"
    )
    assert refused(init_from="nothing.pth") == "there is no weights file nothing.pth"
    Path("empty").mkdir()
    assert refused(init_from="empty") == "empty is not the run folder of a training: it has no config.json"
    Path("text.pth").write_text("not tensors")
    assert "it is no file of torch.save" in refused(init_from="text.pth")
    tiny.write_weights(Path("backbone.safetensors"), tiny.entry())
    assert "does not hold a whole model" in refused(init_from="backbone.safetensors")
    other = default_config()
    other.model.backbone.name = "dinov2_vitb14"
    monkeypatch.setattr(initialization, "read_run", lambda folder: (other, None))
    assert refused(init_from="empty") == (
        "config.init_from=empty is a run on dinov2_vitb14, and this one is on vit_digits; both must have the same "
        "backbone"
    )
