"""Inject faults into a training, and count the cases in which nothing is lost.

    python -m tools.faults --json=faults.json
    python -m tools.faults --quick

Parts:

* kills: SIGKILL, SIGINT and SIGTERM at chosen moments; the run is started again after each.
* damage: a file of a finished run is changed and the training started again.
* disks: full and read-only disks.
* parts: SIGKILL and SIGTERM at random times of a labeling in parts, and a worker of three that is killed for good.

A case is held if:

* kills: the exit code belongs to the signal, 130 for SIGINT and SIGTERM, without a traceback; and the training ends
  bit-identical with a training without faults.
* damage: the training ends bit-identical with exit code 0, or it ends with one sentence and exit code 2.
* disks: one sentence and exit code 4, no partial file, and with space again the same command ends bit-identical.
* parts: the same command, or the other workers, end with exit code 0 and the files of a labeling without faults.

Bit-identical: the sha256 of every array of the state and the selected values in the last checkpoint, its notes,
results.json, per_class.csv, cooccurrence.csv, thresholds.json, config.json, labels.txt, and the rows of metrics.jsonl,
each step once and in order, except for images_per_second and data_wait; and no temporary file remains. Full and
read-only disks are small tmpfs mounts, which need root; without root, a limit on the size of files replaces a full
disk.

--quick takes one case of each kind, within two minutes on two cores.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.faults.program import Ended, Program

Case = tuple[str, str, bool, str]  # part, name, held, observation
TIMING = ("time", "images_per_second", "data_wait")
FILES = ("results.json", "per_class.csv", "cooccurrence.csv", "thresholds.json", "config.json", "labels.txt")
# Moment -> the counts at which a fault hits. A run is hit early, then in its steps, and then late.
EARLY = {"import": (1,), "set-up": (1,), "compile": (1,), "clock": (0.05, 0.5, 1.5)}  # clock: seconds of a new process
STEPS = {"step": (1, 6), "checkpoint-half": (1, 3), "checkpoint-done": (1,), "row": (2, 5), "evaluation": (1, 2)}
LATE = {"final-evaluation": (1,), "saving": (3, 6), "end": (1,)}
SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)


# --------------------------------------------------------------------------------------------------------- identity
def differences(run: Path, whole: Path) -> list[str]:
    """Return the differences between two finished run folders; see the module."""
    changed = [name for name in FILES if _content(run / name) != _content(whole / name)]
    ours, theirs = (_newest(folder) / "notes" / "metadata" for folder in (run, whole))
    if ours.parents[1].name != theirs.parents[1].name or ours.read_bytes() != theirs.read_bytes():
        changed.append("notes of the last checkpoint")
    if _array_digests(run) != _array_digests(whole):
        changed.append("arrays of the last checkpoint")
    if _rows(run) != _rows(whole):
        changed.append("metrics.jsonl")
    return changed + [f"left: {path.relative_to(run)}" for path in run.rglob("*") if "tmp" in path.name]


def _array_digests(run: Path) -> dict:
    """Return the result of `arrays.array_digests`, of a new process: this one forks, so it must not start JAX."""
    command = [sys.executable, "-m", "tools.faults.arrays", str(run.resolve())]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def _newest(run: Path) -> Path:
    return max((path for path in (run / "checkpoints").iterdir() if path.name.isdigit()), key=lambda p: int(p.name))


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _rows(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in TIMING} for row in rows]


# ------------------------------------------------------------------------------------------------------------- kills
def kills(program: Program, whole: Path, *, quick: bool) -> Iterator[Case]:
    """Hit trainings at several moments each, one after another, and compare their ends."""
    early, middle, late = (
        [(moment, number, count) for number in SIGNALS for moment, counts in moments.items() for count in counts]
        for moments in (EARLY, STEPS, LATE)
    )
    if quick:  # each moment once, with changing signals
        early, middle, late = (
            [(moment, number, counts[0]) for (moment, counts), number in zip(moments.items(), itertools.cycle(SIGNALS))]
            for moments in (EARLY, STEPS, LATE)
        )
    for chain in itertools.zip_longest(early, middle, late):
        run = program.place / "killed"
        cases = []
        for moment, number, count in filter(None, chain):
            after = count if moment == "clock" else 0
            fault = f"{moment} {number.value} {1 if after else count}"
            ended = program.train(run, fault, fresh=moment in ("clock", "import"), after=after)
            cases.append((f"{number.name} at {moment} {count}", _wrong_end(ended, number, moment)))
        last = program.train(run)
        different = "; ".join(differences(run, whole)) if last.code == 0 else f"then exit code {last.code}"
        for name, wrong in cases:
            yield "kills", name, not (wrong or different), wrong or different
        shutil.rmtree(run)


def _wrong_end(ended: Ended, number: int, moment: str) -> str:
    """Return what is wrong with the end of a start that was hit, or ""."""
    allowed = {-signal.SIGKILL} if number == signal.SIGKILL else {130}
    if moment == "clock":  # before the program handles signals, or after its end
        allowed |= {-number, 0, 1 if "KeyboardInterrupt" in ended.text else 0}
    if ended.code not in allowed:
        return str(ended)
    return "" if ended.quiet or moment == "clock" else f"a traceback: {ended.text[-300:]}"


# ------------------------------------------------------------------------------------------------------------ damage
def _largest(run: Path) -> Path:
    return max((p for p in (_newest(run) / "state").rglob("*") if p.is_file()), key=lambda path: path.stat().st_size)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def _append(path: Path, content: bytes) -> None:
    path.write_bytes(path.read_bytes() + content)


# One of each kind of file, since the tests of tests/runs and tests/evaluation damage every file in every way.
DAMAGE: dict[str, Callable[[Path], object]] = {
    "a bit of an array": lambda run: _flip(_largest(run)),
    "notes {}": lambda run: (_newest(run) / "notes" / "metadata").write_text("{}"),
    "a damaged line of metrics.jsonl": lambda run: _append(run / "metrics.jsonl", b"\xff\xfe\n"),
    "all arrays deleted": lambda run: shutil.rmtree(_newest(run) / "state"),
    "half a row in metrics.jsonl": lambda run: _append(run / "metrics.jsonl", b'{"step": 9, "lo'),
    "config.json is no UTF-8": lambda run: (run / "config.json").write_bytes(b"\xff\xfe{}"),
    "labels.txt has other labels": lambda run: (run / "labels.txt").write_text("a\nb\n"),
    "truncated images.npz": lambda run: os.truncate(run / "images.npz", 100),
    "truncated scores": lambda run: os.truncate(run / "scores" / "test.npz", 100),
}
QUICK_DAMAGE = 3


def damage(program: Program, whole: Path, *, quick: bool) -> Iterator[Case]:
    """Change a file of a finished run, and train again."""
    for name, change in itertools.islice(DAMAGE.items(), QUICK_DAMAGE if quick else None):
        run = program.place / "damaged"
        shutil.copytree(whole, run)
        change(run)
        ended = program.train(run)
        if ended.code == 0:
            reason = "; ".join(differences(run, whole)) or ("" if ended.quiet else ended.text[-300:])
        else:
            reason = "" if ended.code == 2 and ended.one_sentence else str(ended)
        yield "damage", name, not reason, reason
        shutil.rmtree(run)


# ------------------------------------------------------------------------------------------------------------- disks
@contextlib.contextmanager
def _mounted(place: Path, size: str) -> Iterator[Path | None]:
    """Mount a small disk; None if that is not permitted."""
    place.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        yield None
        return
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def _remount(place: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(place)], check=True)


def _refused(ended: Ended, run: Path) -> str:
    """Return what is wrong with the end of a command that could not write to its disk, or ""."""
    if ended.code != 4 or not ended.one_sentence:
        return str(ended)
    partial = [str(path) for path in run.rglob("*tmp*")]
    return f"left: {', '.join(partial)}" if partial else ""


@contextlib.contextmanager
def _limited_files(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def disks(program: Program, whole: Path, *, quick: bool) -> Iterator[Case]:
    """Train, evaluate, predict and report on disks that are full or read-only."""
    run = program.place / "limited"
    for size in (6_000,) if quick else (6_000, 30_000):
        with _limited_files(size):
            ended = program.train(run, fresh=True)
        yield "disks", f"files of at most {size} bytes: train", *_resumed(program, run, whole, _refused(ended, run))
        shutil.rmtree(run)
    place = program.place / "disk"
    for size in () if quick else ("60k", "120k", "250k", "400k"):
        with _mounted(place, size) as mounted:
            if mounted is None:
                continue
            run = place / "run"
            reason = _refused(program.train(run, fresh=True), run)
            _remount(place, "size=20m")
            yield "disks", f"disk of {size}: train", *_resumed(program, run, whole, reason)
    kinds = (("full", "--mode=eval"),) if quick else tuple(itertools.product(("full", "read-only"), _reading(program)))
    for kind, mode in kinds:
        with _mounted(place, "3m") as mounted:
            if mounted is None:
                continue
            run = place / "run"
            shutil.copytree(whole, run)
            if kind == "full":
                with contextlib.suppress(OSError), open(place / "fill", "wb", buffering=0) as file:
                    for block in (4096, 1):
                        with contextlib.suppress(OSError):
                            while file.write(bytes(block)):
                                pass
            else:
                _remount(place, "ro")
            reason = _refused(program((*mode.split(), f"--workdir={run}"), fresh=True), run)
            yield "disks", f"{kind}: {mode.split()[0]}", not reason, reason


def _reading(program: Program) -> tuple[str, ...]:
    return "--mode=eval", f"--mode=predict --images={program.photo}", "--mode=report", "--mode=thresholds"


def _resumed(program: Program, run: Path, whole: Path, reason: str) -> tuple[bool, str]:
    ended = program.train(run)
    different = differences(run, whole) if ended.code == 0 else [f"then {ended}"]
    reason = "; ".join(filter(None, (reason, *different)))
    return not reason, reason


# ------------------------------------------------------------------------------------------------------------- parts
def label_in_parts(program: Program, whole: Path, *, quick: bool) -> Iterator[Case]:
    """Hit labelings at random times, complete each, and compare it with a labeling without faults."""
    photos, draw = program.place / "many", random.Random(0)
    photos.mkdir()
    for number in range(160):
        shutil.copy(program.photo, photos / f"{number:03d}.png")

    def command(folder: Path, *flags: str) -> tuple[str, ...]:
        flags = (f"--workdir={whole}", f"--images={photos}", f"--output={folder}", "--part-size=8", *flags)
        return "--mode=predict", "--batch-size=4", *flags

    complete = program.place / "complete"
    program(command(complete))
    started = time.monotonic()
    program(command(program.place / "again"))
    duration = time.monotonic() - started
    signals = [signal.SIGKILL] * (2 if quick else 20) + [signal.SIGTERM] * (1 if quick else 10)
    for place, number in enumerate(signals):
        folder, after = program.place / f"parts-{place}", draw.uniform(duration / 2, duration)
        ended = program(command(folder), f"clock {number.value} 1", after=after)
        kept = len(list(folder.glob("part-*")))
        reason = _wrong_end(ended, number, "clock") or _different_parts(program(command(folder)), folder, complete)
        yield "parts", f"{number.name} after {after:.2f} s, {kept} of 20 parts", not reason, reason
    folder = program.place / "by-three"
    workers = [program.start(command(folder, f"--worker={k}/3")) for k in (1, 2, 3)]
    time.sleep(duration / 2)
    workers[0].kill()
    ends = [worker.wait() for worker in workers]
    kept = len(list(folder.glob("part-*")))
    reason = "; ".join(filter(None, (_different_parts(ended, folder, complete) for ended in ends[1:])))
    yield "parts", f"one of three workers is killed, exit code {ends[0].code}", not reason and kept == 20, reason


def _different_parts(ended: Ended, folder: Path, complete: Path) -> str:
    """Return what is wrong with the end of a labeling and its folder, or ""."""
    if ended.code:
        return str(ended)
    ours, theirs = ({path.name: path.read_bytes() for path in place.iterdir()} for place in (folder, complete))
    different = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    return f"different: {', '.join(different)}" if different else ""


# -------------------------------------------------------------------------------------------------------------- main
PARTS = {"kills": kills, "damage": damage, "disks": disks, "parts": label_in_parts}


def main() -> int:
    """Run the parts; return 1 if a case did not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one case of each kind")
    parser.add_argument("--json", help="write the cases and the sums to this file")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of the parts, separated by commas")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits that SIGINT is ignored
    cases: list[Case] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mlmoe-faults-") as folder:
        program, whole = Program(Path(folder)), Path(folder) / "whole"
        ended = program.train(whole)
        if ended.code:
            sys.exit(f"the training without faults failed:\n{ended.text}")
        for part in options.parts.split(","):
            for case in PARTS[part](program, whole, quick=options.quick):
                cases.append(case)
                print(f"{'held' if case[2] else 'LOST'}  {part}: {case[1]}  {case[3]}".rstrip(), flush=True)
    sums = {part: [sum(c[2] for c in cases if c[0] == part), sum(c[0] == part for c in cases)] for part in PARTS}
    for part, (successes, count) in sums.items():
        print(f"{part}: {successes} of {count} held")
    print(f"{time.monotonic() - started:.0f} s")
    if options.json:
        listed = [dict(zip(("part", "case", "held", "seen"), case, strict=True)) for case in cases]
        Path(options.json).write_text(json.dumps({"held_of": sums, "cases": listed}, indent=2) + "\n")
    return int(not all(case[2] for case in cases))


if __name__ == "__main__":
    sys.exit(main())
