import pytest
from helpers.runs import changed
from helpers.scored_run import write_results

from mlmoe_jax.config import default_config, to_json
from mlmoe_jax.runs.folder import CONFIG, RunFolder
from mlmoe_jax.training.resume import changed_keys, config_of_run

TYPES = {"model__dtype": "bfloat16", "model__frozen_dtype": "float32"}


@pytest.fixture
def finished(tmp_path):
    """A function that makes the folder of a finished run out of its stored config."""

    def make(stored: str) -> RunFolder:
        folder = RunFolder(tmp_path)
        folder.write_text(CONFIG, stored)
        write_results(folder, {"test": {}})
        return folder

    return make


def test_a_run_resumes_with_the_same_config_only(finished, capsys, refusal):
    """Keys that only keep a run alive may change, and the change is told."""
    config = default_config()
    config.model.prompts.attention_mask, config.model.prompts.pruning = "cross_group", "learned"
    folder = finished(to_json(config))
    assert changed_keys(config, folder) == []
    config_of_run(config, folder)
    assert capsys.readouterr().err == ""
    config.data.bad_images, config.model.remat, config.data.workers = "skip", True, 3
    config.train.accumulate = 2
    config.data.truncated, config.data.exif = "read", "ignore"
    config.model.kernels = "xla"
    config_of_run(config, folder)
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(": the results can differ from a run without this change")
    changes = "data.bad_images was 'error' and is 'skip'", "model.remat was False and is True"
    for told in (*changes, "train.accumulate was 1 and is 2", "model.kernels was 'auto' and is 'xla'"):
        assert told in line
    assert "data.workers" not in line, "it changes nothing"
    config.model.prompts.attention_mask = "none"
    change = "model.prompts.attention_mask was 'cross_group' and is 'none'"
    assert changed_keys(config, folder) == [change]
    assert f"was trained with a different config ({change}); rerun" in refusal(config_of_run, config, folder)


def test_a_run_without_a_key_that_came_later_has_its_default(finished, capsys):
    stored = default_config()
    del stored.model["kernels"]
    assert config_of_run(default_config(), finished(to_json(stored))).model.kernels == "auto"
    assert capsys.readouterr().err == ""


def test_a_run_keeps_the_types_that_it_recorded(finished):
    folder = finished(to_json(changed(default_config(), TYPES)))
    now = config_of_run(default_config(), folder)
    assert (now.model.dtype, now.model.frozen_dtype) == ("bfloat16", "float32")


@pytest.mark.parametrize(
    ("stored", "now", "changes"),
    [
        ({}, {"data__workers": 3, "mesh__fsdp": 2, "train__log_every": 5}, []),  # these change no results
        ({}, {"data__cache_features": "float16"}, ["data.cache_features was 'no' and is 'float16'"]),
        (TYPES, {}, []),  # only auto is replaced
        (TYPES, TYPES | {"model__frozen_dtype": "bfloat16"}, ["model.frozen_dtype was 'float32' and is 'bfloat16'"]),
        (TYPES, TYPES | {"model__dtype": "float32"}, ["model.dtype was 'bfloat16' and is 'float32'"]),
        # a loss term of one's own
        ({"loss__terms__mine": 1.0}, {"loss__terms__mine": 1.0}, []),
        ({"loss__terms__mine": 1.0}, {}, ["loss.terms.mine was 1.0 and is 0.0"]),
        ({}, {"loss__terms__mine": 1.0}, ["loss.terms.mine was 0.0 and is 1.0"]),
    ],
)
def test_changes_that_prevent_a_resume_are_described(finished, stored, now, changes):
    assert changed_keys(changed(default_config(), now), finished(to_json(changed(default_config(), stored)))) == changes
