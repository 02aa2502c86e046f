"""What a report refuses: folders without a run, and damaged files of one."""

import re
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.made_run import make_run
from helpers.refusals import CUT, EMPTY, GONE, Refusal, damaged, each, replacing

from mlmoe_jax.apps.report.page import write_report
from mlmoe_jax.apps.report.run_files import RunFiles
from mlmoe_jax.runs.folder import RunFolder

pytestmark = pytest.mark.usefixtures("no_bundle")


def made(at) -> RunFolder:
    return make_run(at / "run")


@contextmanager
def without_a_data_set(at):
    """A run with an empty config, and a folder for data that would be made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLMOE_CACHE", str(at / "cache"))
        made(at).write_text("config.json", "{}")
        yield RunFolder(at / "run")


def beside_a_bare_run(at) -> dict:
    made(at)
    bare = RunFolder(at / "bare")
    bare.write_text("config.json", (at / "run" / "config.json").read_text())
    return {"folder": RunFolder(at / "run"), "against": bare}


def broken(name: str, file: str, how, says: str) -> Refusal:
    """A run with a damaged file, which the sentence names."""
    return damaged(name, made, f"run/{file}", how, write_report, f"{{at}}/run/{file} is damaged: {says}")


REFUSALS = [
    Refusal("no folder", None, lambda at: write_report(RunFolder(at / "none")), "there is no run folder"),
    damaged("no config", made, "run/config.json", GONE, RunFiles, "it has no config"),
    Refusal(
        "no results to compare with", beside_a_bare_run, lambda given: write_report(**given), "has no results.json"
    ),
    Refusal(
        "an output below a file", made, lambda run: write_report(run, output=run / "labels.txt/a.html"), "cannot write"
    ),
]
DAMAGE = [
    broken("results in invalid JSON", "results.json", b"{", ""),
    broken("costs in invalid UTF-8", "cost.json", b"\xff", ""),
    broken("costs of another form", "cost.json", '{"x": 1}', "it has no "),
    broken("a letter as a number", "per_class.csv", "split,label,AP\nval,cat,à\n", ""),
    broken("a list as the index of samples", "samples/index.json", "[]", ""),
    broken("an index without samples", "samples/index.json", "{}", "it has no 'samples'"),
    broken("an index without a grid", "samples/index.json", replacing('"grid": [', '"grid": null, "": ['), ""),
    broken("cut arrays of samples", "samples/explained.npz", CUT, ""),
    broken("no scores", "scores/test.npz", EMPTY, ""),
    Refusal("no data set", without_a_data_set, write_report, "{at}/run/config.json is damaged: it has no 'data.name'"),
]


@each(REFUSALS)
def test_no_report_is_written(case, tmp_path):
    case.check(tmp_path)


@each(DAMAGE)
def test_a_damaged_file_is_named(case, tmp_path):
    case.check(tmp_path)


def outside(name: str, file: str, change, says: str) -> Refusal:
    """A run whose file `file` is a link to a file of others, or names one."""

    def make(at) -> RunFolder:
        run = made(at)
        (at / "theirs").write_text("{}")
        change(run, file)
        return run

    return Refusal(name, make, write_report, says)


def link_out(run: RunFolder, file: str) -> None:
    path = Path(run.path, file)
    path.unlink(missing_ok=True)
    path.symlink_to(path.parents[file.count("/") + 1] / "theirs")


def name_out(run: RunFolder, file: str) -> None:
    run.update(
        "samples/index.json", lambda: re.sub(rb"samples/0000\.jpg", file.encode(), run.read_bytes("samples/index.json"))
    )


@each(
    [
        *(
            outside(
                f"{file} as a link", file, link_out, f"{{at}}/run/{file} is a link out of the run folder {{at}}/run"
            )
            for file in ("samples/0000.jpg", "samples/index.json", "results.json", "metrics.jsonl", "scores/test.npz")
        ),
        *(
            outside(
                f"a sample at {file}", file, name_out, f"'{file}' does not name a file in the run folder {{at}}/run"
            )
            for file in ("../theirs", "/etc/passwd", "samples/../../theirs")
        ),
    ]
)
def test_a_report_shows_no_file_outside_its_run(case, tmp_path):
    case.check(tmp_path)
