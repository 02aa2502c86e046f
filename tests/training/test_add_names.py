"""Labels that are added to a model by their names, without training."""

import numpy as np
import pytest
from helpers.drawn_images import noise
from helpers.named_runs import HEADS, write_run
from helpers.runs import scores_by

from mlmoe_jax.inference.predictor import Predictor
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.training.import_run import import_run

pytestmark = pytest.mark.usefixtures("run")  # the smallest backbone


@pytest.mark.variants(head=("Q2L", "shared experts", "ML-GCN", "cosine"))  # ML-Decoder adds as Q2L does
@pytest.mark.parametrize("head", HEADS)
def test_an_added_label_changes_no_score_of_the_others(tmp_path, head, capsys):
    import_run(write_run(tmp_path, **HEADS[head]), RunFolder(tmp_path / "more"))
    before, after = (Predictor.from_run(tmp_path / name) for name in ("run", "more"))
    assert after.names == ("boat", "sea", "dune")
    scores, more = (scores_by(predictor, noise(4)) for predictor in (before, after))
    np.testing.assert_allclose(more[:, :2], scores, rtol=2e-5, atol=1e-6)
    assert np.ptp(more[:, 2]) > 0
    assert np.abs(more[:, 2:] - scores).max(axis=0).min() > 1e-6
    told = capsys.readouterr().err
    assert "labels matched by name: boat, sea; new: dune; left out: none" in told
    assert (tmp_path / "more" / "labels.txt").read_text().split() == ["boat", "sea", "dune"]


def test_an_import_that_was_killed_is_made_again_by_the_same_command(tmp_path):
    config, folder = write_run(tmp_path, **HEADS["cosine"]), RunFolder(tmp_path / "more")
    import_run(config, folder)
    for path in folder.path.iterdir():
        if path.name != "adapter.safetensors":
            path.unlink()
    import_run(config, folder)
    assert (folder / "config.json").exists()
