"""`python -m benchmarks.prove`: the page, verdicts, resuming, the budget and failures, with parts that take no time."""

import json
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from helpers.paths import REPOSITORY

from benchmarks import proof, prove
from benchmarks.chips import chip_of
from benchmarks.proof import Outcome, Part, Setup
from benchmarks.suites import agreement, mfu

ABOUT = {"devices": "1 × a chip", "commit": "abc"}
FACTS = {"platform": "tpu", "devices": ["TPU v5 lite"] * 8, "memory": None, "runtime": "r", "packages": {"jax": "1"}}


def part(name: str, program: str = "print(7)", minutes: float = 1, **more) -> Part:
    """Return a part that runs a program of Python, whose output is its number."""

    def read(setup, output, code):
        return Outcome("passed", f"it is {int(output)}", "| a table |", {"value": int(output)})

    return Part(name, f"About {name}.", minutes, lambda setup, seconds: [sys.executable, "-c", program], read, **more)


@pytest.fixture
def setup(tmp_path):
    (tmp_path / "parts").mkdir()
    return Setup(tmp_path, short=True, facts=FACTS)


def test_parts_that_fail_or_hang_leave_the_other_parts(setup):
    hangs = "import sys, time; print('waiting', file=sys.stderr, flush=True); time.sleep(60)"
    broken = "import sys; sys.exit('error: the disk is full')"
    parts = [part("hangs", hangs, minutes=0.02), part("broken", broken), part("odd", "print('x')"), part("works")]
    mine, began = prove.Proof(setup.out, ABOUT), time.monotonic()
    prove.run_parts(mine, parts, setup, budget=60)
    assert time.monotonic() - began < 20
    assert [mine.verdict(one) for one in parts] == ["out of time", "failed", "failed", "passed"]
    assert mine.outcomes["broken"].result == "exit code 1: error: the disk is full"
    assert mine.outcomes["hangs"].result.endswith("its last message: waiting")
    assert "cannot be read: ValueError" in mine.outcomes["odd"].result
    assert json.loads((setup.out / "proof.json").read_text())["parts"]["works"]["rows"] == {"value": 7}


def test_a_part_that_is_out_of_time_leaves_no_process(setup, tmp_path):
    late = tmp_path / "late"
    child = f"import time; time.sleep(2); open({str(late)!r}, 'w')"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert prove.execute(part("parent", program), setup, 0.5).verdict == "out of time"
    time.sleep(2)
    assert not late.exists()


def test_finished_parts_are_read_and_others_repeated(setup, tmp_path):
    count = f"open({str(tmp_path / 'count')!r}, 'a').write('x'); print(1)"
    parts = [part("good", count), part("bad", f"{count}; raise SystemExit(1)")]
    for _ in range(2):
        prove.run_parts(prove.Proof.open(setup.out, ABOUT), parts, setup, budget=60)
    assert (tmp_path / "count").read_text() == "xxx"


def test_rows_of_a_failed_suite_are_measured_again(setup):
    rows = setup.parts / "suite.json"
    for verdict, stays in (("out of time", True), ("failed", False)):
        rows.write_text("{}")
        mine = prove.Proof(setup.out, ABOUT, {"suite": Outcome(verdict, "")})
        prove.run_parts(mine, [part("suite")], setup, budget=60)
        assert rows.exists() is stays


def test_parts_of_another_commit_are_refused(setup, capsys):
    prove.Proof(setup.out, ABOUT).write([])
    with pytest.raises(SystemExit, match="2"):
        prove.Proof.open(setup.out, ABOUT | {"commit": "def"})
    assert capsys.readouterr().err.endswith("proof.json has other commit; name another folder with --out\n")


def test_a_part_gets_its_share_and_what_earlier_parts_left(setup, monkeypatch):
    limits = {}

    def execute(one, setup, seconds):
        limits[one.name] = seconds
        return Outcome("failed", "")

    monkeypatch.setattr(prove, "execute", execute)
    parts = [part("a", short_minutes=7), part("b", minutes=3), part("paper", minutes=90, own_time=True)]
    for short, share in ((False, 20), (True, 70)):
        prove.run_parts(prove.Proof(setup.out, ABOUT), parts, replace(setup, short=short), budget=80)
        assert limits["a"] == pytest.approx(share, abs=1)
        assert limits["b"] == pytest.approx(80, abs=1)
        assert limits["paper"] == 90 * 60


def test_the_page_has_the_machine_a_verdict_per_part_and_its_tables():
    parts, outcomes = [part("a"), part("b"), part("c")], {"a": Outcome("passed", "x | y", "| t |", seconds=90)}
    page = prove.Proof(None, ABOUT, outcomes | {"b": Outcome("failed", "no memory")}).page(parts)
    assert page.startswith("# Proof on 1 × a chip\n\n**1 passed, 1 failed, 1 not run,** written 20")
    for line in ("| commit | abc |", "| a | passed | x / y | 1.5 |", "| b | **failed** | no memory | 0.0 |", "| t |"):
        assert line in page.splitlines()
    assert "## c\n\nAbout c." in page


def test_the_head_of_the_page_names_known_errors_of_the_jax_version():
    name = "known errors"
    assert prove.describe(FACTS, short=True)[name] == "none of this JAX version on this device"
    assert prove.describe(FACTS | {"known_errors": "JAX 0.10.2 is wrong"}, short=True)[name] == "JAX 0.10.2 is wrong"


# ------------------------------------------------------------------------------------------------------------- parts
def test_a_suite_part_reads_rows_tables_and_errors(setup):
    suite = proof.suite("overhead", 1, 1, proof._judge_overhead, "--batches=64N")
    command = " ".join(suite.command(replace(setup, short=False), 600))
    assert "--suite=overhead --json=" in command
    assert "--batches=512" in command
    assert "--minutes=7.5" in command
    rows = {f"overhead: {count}": {"seconds": count / 1e3} for count in (1, 2)}
    file = setup.parts / "overhead.json"
    file.write_text(json.dumps({"rows": rows}))
    outcome = suite.read(setup, "a machine\n**Table**\n", 0)
    assert (outcome.verdict, outcome.tables) == ("measured", "**Table**\n")
    assert outcome.result == "ms of the host per step: 1 1.00, 2 2.00"
    assert suite.read(setup, "", 3).verdict == "out of time"
    file.write_text(json.dumps({"rows": {"x": {"ours": {"error": "no memory"}}}}))
    assert suite.read(setup, "", 0).result == "no memory"


def test_the_twin_takes_part_and_its_failure_is_no_failure_of_the_part(setup):
    step = next(one for one in proof.PARTS if one.name == "step")
    assert "--peer=python" in step.command(replace(setup, peer="python"), 60)
    assert not [word for word in step.command(setup, 60) if word.startswith("--peer")]
    ours, twin = ({"rounds": [{"seconds": seconds}]} for seconds in (0.5, 1.0))
    sides = {"ours": ours, "PyTorch": twin, "PyTorch, compiled": {"error": "no compiler"}}
    rows = {"step: method=ml-vpt mode=train batch=8 resolution=224 |": sides}
    (setup.parts / "step.json").write_text(json.dumps({"rows": rows}))
    outcome = step.read(setup, "", 0)
    assert outcome.verdict == "measured"
    assert outcome.result == "training, images/s: ml-vpt at 224 px 16.0 (2.00 times PyTorch)"


@pytest.mark.parametrize(("gradients", "verdict"), [(1e-6, "passed"), (1e-2, "failed"), (float("nan"), "failed")])
def test_differences_beyond_a_limit_fail(gradients, verdict):
    rows = {
        f"{dtype} {precision}": {"dtype": dtype, "precision": precision, "loss": 0.0, "logits": 0.0, "gradients": 1e-6}
        for dtype, precision in agreement.LIMITS
    }
    rows["float32 highest"]["gradients"] = gradients
    assert proof._judge_agreement(rows)[0] == verdict


def test_digits_are_compared_with_the_table_of_the_readme(setup):
    epochs, rate, known = proof.known_digits()
    flags = [f"--config.train.epochs={epochs}", f"--config.optim.learning_rate={rate}"]
    assert proof._digits_command(replace(setup, short=False), 60)[-2:] == flags
    assert f"{epochs} epochs" in (text := (REPOSITORY / "README.md").read_text())
    assert f"| {known:.2f} ±" in text
    (setup.out / "digits").mkdir()
    for ours, verdict in ((known - 0.9, "passed"), (known - 1.1, "failed")):
        (setup.out / "digits" / "results.json").write_text(json.dumps({"test": {"metrics": {"mAP": ours / 100}}}))
        assert proof._read_digits(replace(setup, short=False), "", 0).verdict == verdict


def test_rows_of_papers_take_part_if_their_data_is_there(setup, tmp_path):
    assert [one.name for one in proof.parts_of(setup, ["digits"])] == ["digits"]
    whole = replace(setup, voc2007=tmp_path, coco=tmp_path, checkpoint=tmp_path / "model.pth")
    names = [one.name for one in proof.parts_of(whole, [])]
    assert names == ["voc2007 VPT", "voc2007 E2VPT", "voc2007 ML-VPT", "import", "coco2014"]
    row = {"column": "mAP", "ours": 92.0, "published": 92.8, "standard_deviation": 0.1, "seeds": 3}
    assert proof._read_table(whole, json.dumps([row]), 0).result.startswith("mAP 92.00 ± 0.10 over 3 seeds, published")
    assert proof._read_eval(whole, json.dumps({"val": {"mlvpt/mAP": 0.872}}), 0).verdict == "failed"


def test_names_are_measured_on_voc2007_if_both_are_given(setup, tmp_path):
    whole = replace(setup, photos=tmp_path, names=tmp_path / "names.txt")
    parts = proof.parts_of(whole, [])
    assert [one.name for one in parts[:2]] == ["names clip_vitb16", "voc2007 by name clip_vitb16"]
    assert len(parts) == 2 * len(proof.ZERO_SHOT)
    scored = json.dumps({"test": {"mAP": 0.79}})
    assert parts[1].read(whole, scored, 0).result == "mAP 79.00 by the names alone; published 78.88"
    assert parts[3].read(whole, scored, 0).result.endswith("no published number is known")


@pytest.mark.parametrize("one", [*proof.TABLE_2, *proof.CHECKPOINT, *proof.BY_NAME], ids=lambda one: one.name)
def test_commands_of_papers_are_understood(one, setup, tmp_path):
    from mlmoe_jax.apps.cli.flags import parse_flags
    from mlmoe_jax.apps.papers.request import parse_request
    from mlmoe_jax.config import load_config, validate

    setup = replace(setup, voc2007=tmp_path, coco=tmp_path, checkpoint=tmp_path / "model.pth")
    setup = replace(setup, photos=tmp_path, names=tmp_path / "names.txt")
    flags, overrides = parse_flags(one.command(setup, 60)[3:])
    if flags.mode == "import":
        config = load_config(flags.config, overrides)
        validate(config)
    if one.name == "import":
        assert (config.data.test_splits, config.metrics.preset, config.eval.dtype) == (("val",), "mlvpt", "float16")
    if flags.mode == "reproduce":
        request = parse_request(flags.table, only=flags.only, root=flags.root, seeds=flags.seeds)
        [row] = request.rows
        assert (row.settings["method"], row.backbone, len(request.runs)) == (one.name.split()[1], "dinov2_vits14", 3)
        assert str(row.numbers["mAP"]) == {"VPT": "92.8", "E2VPT": "89.6", "ML-VPT": "94.3"}[row.settings["method"]]


def test_the_peak_of_a_device_is_known_or_left_out():
    assert chip_of("TPU v5 lite").flops == 197e12
    assert chip_of("NVIDIA H100 80GB HBM3").flops == 989e12
    assert chip_of("cpu") is None
    of, outcome = {"batch": 8, "dtype": "bfloat16"}, {"macs": 197e12 / 64, "rounds": [{"seconds": 0.25}]}
    assert mfu.utilization(of, outcome, ["TPU v5 lite"] * 8) == (197e12 / 8, 0.125)
    assert mfu.utilization(of, outcome, ["cpu"])[1] is None
    assert mfu.utilization(of | {"dtype": "float32"}, outcome, ["TPU v5 lite"])[1] is None


# -------------------------------------------------------------------------------------------------------- the command
@pytest.mark.parametrize(
    "flag",
    [
        "--minutes=0",
        "--parts=devices,speed",
        "--voc2007=nowhere",
        "--peer=nowhere",
        f"--coco={REPOSITORY}",
        f"--photos={REPOSITORY}",
    ],
)
def test_a_wrong_flag_is_refused(flag, capsys):
    with pytest.raises(SystemExit, match="2"):
        prove.main([flag])
    assert flag.partition("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize(("platform", "words", "code"), [("cpu", [], 2), ("cpu", ["--short"], 0), ("gpu", [], 0)])
def test_without_an_accelerator_only_the_short_form_runs(platform, words, code, tmp_path, monkeypatch):
    first = replace(part("devices"), read=lambda *_: Outcome("measured", "", rows=FACTS | {"platform": platform}))
    monkeypatch.setattr(prove, "PARTS", (first, part("a")))
    monkeypatch.setattr(proof, "PARTS", prove.PARTS)
    assert prove.main([f"--out={tmp_path}", *words]) == code
    assert (tmp_path / "proof.md").exists() is (code == 0)


def test_devices_that_cannot_be_used_are_on_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prove, "PARTS", (part("devices", "import sys; sys.exit('no driver')"), part("a")))
    monkeypatch.setattr(proof, "PARTS", prove.PARTS)
    assert prove.main([f"--out={tmp_path}"]) == 1
    assert capsys.readouterr().err == "error: the devices cannot be used: exit code 1: no driver\n"
    assert "| a | **not run** |" in (tmp_path / "proof.md").read_text()


SHOWN = {  # part -> what its tables have
    "agreement": ["**Agreement**", "| tiny ML-VPT, the authors' code | bfloat16 |", "this package on the CPU"],
    "step": ["**Training**", "**Inference**", "**One encoded image to its labels**", "| ours |"],
    "mfu": ["**Model FLOP/s utilization**", "there is no MFU"],
    "memory": ["**Peak memory**", "**Largest training batch", "| train |"],
    "attention": ["| the package's choice: its matmuls |", "| jax.nn.dot_product_attention |"],
    "data": ["**Input pipeline", "| ours: decode + resize |", "reduced decoding"],
    "digits": ["| val | test | test_shift |"],
    "loop": ["**The training loop**", "| drawn | ours |"],
    "overhead": ["| 2 processes, on the CPU |", "a store of 50 ms"],
}


def test_the_short_form_measures_with_every_part(tmp_path):
    command = [sys.executable, "-m", "benchmarks.prove", "--short", f"--out={tmp_path}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    parts = (tmp_path / "proof.md").read_text().split("\n## ")[1:]
    assert [one.partition("\n")[0] for one in parts] == [part.name for part in proof.PARTS] == ["devices", *SHOWN]
    for part, (name, texts) in zip(parts[1:], SHOWN.items(), strict=True):
        assert [text for text in texts if text not in part] == [], name
