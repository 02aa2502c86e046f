"""Made-up runs, and the report page of one of them compared with the other."""

import pytest
from helpers.made_run import make_run

from mlmoe_jax.apps.report import page, result_sections, training
from mlmoe_jax.apps.report.run_files import RunFiles
from mlmoe_jax.apps.tools.compare import compare_runs
from mlmoe_jax.runs.folder import RunFolder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("report") / "run")


@pytest.fixture
def copied(run, tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.adopt(run)
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("report") / "other", seed=1, samples=0)


@pytest.fixture(scope="module", autouse=True)
def few_resamples():
    intervals = training.intervals
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(result_sections, "compare_runs", lambda a, b: compare_runs(a, b, resamples=20))
        patch.setattr(training, "intervals", lambda files, resamples=20: intervals(files, resamples=resamples))
        yield


@pytest.fixture
def no_bundle(monkeypatch):
    """Omit the chart library in tests that draw no charts."""
    monkeypatch.setattr(page, "vega_bundle", lambda: "")


@pytest.fixture(scope="module")
def text(run, other, few_resamples) -> str:
    return page.render(RunFiles(run, RunFiles(other)), "")
