"""A training step without compilation, as docs/troubleshooting.md shows it: modules print values."""

import jax
import pytest
from helpers import tiny
from helpers.runs import recipe

from mlmoe_jax.models.heads.linear import LinearHead
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.training import loop


@pytest.mark.slow
@pytest.mark.usefixtures("run")
def test_a_module_prints_values_without_jit(tmp_path, monkeypatch, capsys):
    config = recipe("probe")
    tiny.use_scenes(monkeypatch, train=8, val=4, test=4, test_shift=4)
    config.train.epochs, config.train.batch_size, config.eval.batch_size, config.report.samples = 1, 8, 4, 0  # one step
    config.data.val_split, config.eval.select_on = "", "none"
    call = LinearHead.__call__

    def printing(self, features, *args, **options):
        print(f"features {features.cls}")
        return call(self, features, *args, **options)

    monkeypatch.setattr(LinearHead, "__call__", printing)
    monkeypatch.setattr(loop, "finish", lambda *_: {})
    with jax.disable_jit():
        loop.train(config, RunFolder(tmp_path / "run"))
    printed = capsys.readouterr().out
    assert printed.startswith("features [[")
    assert "Traced<" not in printed
