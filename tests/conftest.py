"""Shared by the tests of the package: the real sample images, and a check that an error is one plain sentence."""

from pathlib import Path

import pytest
from helpers.commands import assert_sentence
from helpers.paths import REPOSITORY

from mlmoe_jax.errors import UserError


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with real VOC and COCO images in their published layouts, which are not part of the repository."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the sample images, ../shared/data, are not part of the repository and not here")
    return folder


@pytest.fixture
def precious(tmp_path_factory):
    """A file of the user's in a folder of its own, which nothing may change."""
    path = tmp_path_factory.mktemp("precious") / "notes.txt"
    path.write_text("precious")
    yield path
    assert [(found, found.read_text()) for found in path.parent.iterdir()] == [(path, "precious")]


@pytest.fixture
def refusal():
    """A function that makes a call, expects UserError with one sentence, and returns the sentence."""

    def call(function, *args, error=UserError, **options) -> str:
        with pytest.raises(error) as caught:
            function(*args, **options)
        return assert_sentence(str(caught.value))

    return call


@pytest.fixture
def unreadable_image(monkeypatch):
    """Image 3 of every split in memory cannot be read, until this function is called."""
    from mlmoe_jax.data.decoding import BadImage
    from mlmoe_jax.data.images import ArrayImages

    read = ArrayImages.open

    def sometimes(self, row, *decoding):
        if row == 3:
            raise BadImage("cannot read image 3 as an image: it is empty")
        return read(self, row, *decoding)

    monkeypatch.setattr(ArrayImages, "stamp", lambda self, row: str(row))
    monkeypatch.setattr(ArrayImages, "open", sometimes)
    return lambda: monkeypatch.setattr(ArrayImages, "open", read)


@pytest.fixture
def drawn_parts():
    """A function that builds the model of a config with values drawn in numpy, which compiles nothing."""
    from helpers.bench import drawn_model

    from mlmoe_jax.runs.assemble import split_model

    return lambda config, label_space: split_model(drawn_model(config, label_space), config)


@pytest.fixture
def two_steps(drawn_parts):
    """A function that takes two training steps of a config on four made-up images and their labels.

    Returns the state before, as numpy, the state after, and the metrics of the last step.
    """
    import jax
    import numpy as np
    from helpers.bench import Bench, drawn_batch

    from mlmoe_jax.data.labels.space import synthetic_label_space

    def run(config):
        prompts = config.model.prompts
        prompts.count, prompts.num_groups, prompts.per_group = 3, 2, 2
        config.optim.schedule, config.optim.learning_rate, config.ema.decay = "constant", 1e-2, 0.9
        parts = drawn_parts(config, synthetic_label_space(4, 2))
        bench = Bench(config, parts, 4)
        before, batch = jax.device_get(bench.start()), drawn_batch(4, 64, 4)
        batch["label"] = np.array([[1, 0, 0, 1], [0, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1]], np.float32)
        state, log = bench.run(batch, 2)
        assert np.isfinite(log[-1]["loss"])
        return before, state, log[-1]

    return run
