import pytest
from helpers.scored_run import write_results

from mlmoe_jax.config import default_config, to_json
from mlmoe_jax.runs.folder import CONFIG, RunFolder
from mlmoe_jax.training.resume import changed_keys, config_of_run


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
    config_of_run(config, folder)
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(": the results can differ from a run without this change")
    changes = "data.bad_images was 'error' and is 'skip'", "model.remat was False and is True"
    for told in (*changes, "train.accumulate was 1 and is 2"):
        assert told in line
    assert "data.workers" not in line, "it changes nothing"
    config.model.prompts.attention_mask = "none"
    change = "model.prompts.attention_mask was 'cross_group' and is 'none'"
    assert changed_keys(config, folder) == [change]
    assert f"was trained with a different config ({change}); rerun" in refusal(config_of_run, config, folder)


def test_a_run_keeps_the_types_that_it_recorded(finished):
    config = default_config()
    config.model.dtype, config.model.frozen_dtype = "bfloat16", "float32"
    folder, now = finished(to_json(config)), default_config()
    assert changed_keys(now, folder) == []
    now = config_of_run(now, folder)
    assert (now.model.dtype, now.model.frozen_dtype) == ("bfloat16", "float32")
    now.model.frozen_dtype = "bfloat16"
    assert changed_keys(now, folder) == ["model.frozen_dtype was 'float32' and is 'bfloat16'"], "only auto is replaced"
    now.model.dtype, now.model.frozen_dtype = "float32", "float32"
    assert changed_keys(now, folder) == ["model.dtype was 'bfloat16' and is 'float32'"]


def test_a_custom_loss_term_is_part_of_the_config_of_a_run(finished):
    config = default_config()
    config.loss.terms.mine = 1.0
    assert changed_keys(config, finished(to_json(config))) == []
    assert changed_keys(default_config(), finished(to_json(config))) == ["loss.terms.mine was 1.0 and is 0.0"]
    assert changed_keys(config, finished(to_json(default_config()))) == ["loss.terms.mine was 0.0 and is 1.0"]


def test_keys_that_do_not_change_results_are_free(finished):
    config = default_config()
    folder = finished(to_json(config))
    config.data.workers, config.mesh.fsdp, config.train.log_every = 3, 2, 5
    assert changed_keys(config, folder) == []
    config.data.cache_features = "float16"
    assert changed_keys(config, folder) == ["data.cache_features was 'no' and is 'float16'"]
