"""Inject faults into a training, and count the cases in which nothing is lost.

    python -m tools.faults --json=faults.json
    python -m tools.faults --quick

Parts:

* kills: SIGKILL, SIGINT and SIGTERM at chosen moments; the run is started again after each.
* damage: a file of a finished run is changed and the training started again.
* disks: full and read-only disks.
* writers: two processes on one run folder.
* hostile: a run folder with links out of it and foreign names.
* servers: images that take minutes to decode, slow bodies and headers, idle connections; then SIGTERM.
* people: an audit while a person answers the suggestions of the audit before.
* stale: images and keys change between two commands that keep what they derive from images.
* together: thresholds of a run are fitted while its calibration is.
* temporary: SIGKILL while files are written to the cache and to outputs.
* workers: scripts that are not made for worker processes, and workers that die or hang.

A case is held if:

* kills: the exit code belongs to the signal, 130 for SIGINT and SIGTERM, without a traceback; and the training ends
  bit-identical with a training without faults.
* damage: the training ends bit-identical with exit code 0, or it ends with one sentence and exit code 2.
* disks: one sentence and exit code 4, no partial file, and with space again the same command ends bit-identical.
* writers: the second ends with one sentence and exit code 2, the first bit-identical.
* hostile: the file outside the run folder is not changed, and not part of a report.
* servers: another client is answered within 5 seconds, and the server ends 8 seconds after SIGTERM with exit code 0.
* people: no answer is lost.
* stale: the result is that of an empty folder or cache, or one sentence and exit code 2.
* together: thresholds.json is that of both commands one after the other, or of one if the other is refused.
* temporary: after the next command no temporary file is left, except those of living processes.
* workers: the script reads its images or ends with an error, and SIGTERM stops a training with exit code 130.

Bit-identical: the sha256 of every array of the state and the selected values in the last checkpoint, its notes,
results.json, per_class.csv, cooccurrence.csv, thresholds.json, config.json, labels.txt, and the rows of metrics.jsonl,
each step once and in order, except for images_per_second and data_wait; and no temporary file remains. Full and
read-only disks are small tmpfs mounts, which need root; without root, a limit on the size of files replaces a full
disk.

--quick takes one case of each kind, within eight minutes on two cores.
"""

import argparse
import contextlib
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.faults.outside import Case, people, servers, stale, temporary, together, workers
from tools.faults.program import COMMAND, Ended, Program

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
    for item in ("digests", "notes"):
        ours, theirs = (_newest(folder) / item / "metadata" for folder in (run, whole))
        if ours.parent.parent.name != theirs.parent.parent.name or ours.read_bytes() != theirs.read_bytes():
            changed.append(f"{item} of the last checkpoint")
    if _rows(run) != _rows(whole):
        changed.append("metrics.jsonl")
    return changed + [f"left: {path.relative_to(run)}" for path in run.rglob("*") if "tmp" in path.name]


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _newest(run: Path) -> Path:
    return max((path for path in (run / "checkpoints").iterdir() if path.name.isdigit()), key=lambda p: int(p.name))


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


def _notes(run: Path, change: Callable[[dict], object]) -> None:
    path = _newest(run) / "notes" / "metadata"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def _text(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda run: (run / name).write_bytes(content)


def _append(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda run: (run / name).write_bytes((run / name).read_bytes() + content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a bit of an array": lambda run: _flip(_largest(run)),
    "an array truncated to half": lambda run: os.truncate(_largest(run), _largest(run).stat().st_size // 2),
    "notes {}": lambda run: _notes(run, lambda notes: {}),
    "a damaged line of metrics.jsonl": _append("metrics.jsonl", b"\xff\xfe\n"),
    "config.json is no UTF-8": _text("config.json", b"\xff\xfe{}"),
    "an array emptied": lambda run: _largest(run).write_bytes(b""),
    "an array deleted": lambda run: _largest(run).unlink(),
    "all arrays deleted": lambda run: shutil.rmtree(_newest(run) / "state"),
    "notes are a list": lambda run: _notes(run, lambda notes: [1]),
    "notes with better scores": lambda run: _notes(run, lambda notes: notes | {"best": {"raw": 0.9999, "ema": 0.9999}}),
    "notes with a further key": lambda run: _notes(run, lambda notes: notes | {"more": 1}),
    "truncated notes": lambda run: (_newest(run) / "notes" / "metadata").write_text("{"),
    "digests {}": lambda run: (_newest(run) / "digests" / "metadata").write_text("{}"),
    "digests deleted": lambda run: shutil.rmtree(_newest(run) / "digests"),
    "a checkpoint under another number": lambda run: _newest(run).rename(run / "checkpoints" / "9999"),
    "an empty checkpoint of a later step": lambda run: (run / "checkpoints" / "9999").mkdir(),
    "a half-written checkpoint": lambda run: (run / "checkpoints" / "9.orbax-checkpoint-tmp" / "state").mkdir(
        parents=True
    ),
    "a number in metrics.jsonl": _append("metrics.jsonl", b"5\n"),
    "half a row in metrics.jsonl": _append("metrics.jsonl", b'{"step": 9, "lo'),
    "a deep line in metrics.jsonl": _append("metrics.jsonl", b"[" * 100_000 + b"\n"),
    "config.json is deep": _text("config.json", b"[" * 100_000),
    "labels.txt has other labels": _text("labels.txt", b"a\nb\n"),
    "truncated label_space.npz": lambda run: os.truncate(run / "label_space.npz", 100),
    "truncated images.npz": lambda run: os.truncate(run / "images.npz", 100),
    "preprocess.json is a number": _text("preprocess.json", b"5"),
    "backbone.json is a number": _text("backbone.json", b"5"),
    "starts.json is a number": _text("starts.json", b"5"),
    "results.json is a list": _text("results.json", b"[]"),
    "thresholds.json is a number": _text("thresholds.json", b"5"),
    "truncated scores": lambda run: os.truncate(run / "scores" / "test.npz", 100),
    "partial files of a killed process": _text(".results.json.tmp", b"{"),
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


# ------------------------------------------------------------------------------------------------- writers, hostile
def writers(program: Program, whole: Path, *, quick: bool) -> Iterator[Case]:
    """Start a second process on the run folder of a running training."""
    commands = {"train": COMMAND, "thresholds": ("--mode=thresholds",)}
    for name in ("train",) if quick else commands:
        run, go = program.place / "shared", program.place / "go"
        wait = program.begin((*COMMAND, f"--workdir={run}"), f"checkpoint-done wait 1 {go}")
        while not (run / "checkpoints" / "2").exists():
            time.sleep(0.05)
        second = program((*commands[name], f"--workdir={run}"))
        go.touch()
        first = wait()
        reason = "" if second.code == 2 and second.one_sentence else str(second)
        different = differences(run, whole) if first == 0 else [f"the first ended with {first}"]
        reason = "; ".join(filter(None, (reason, *different)))
        yield "writers", f"train and {name}", not reason, reason
        shutil.rmtree(run)
        go.unlink()


def hostile(program: Program, whole: Path, *, quick: bool) -> Iterator[Case]:
    """Use a run folder with links to a file of the user, which no command may change or show."""
    secret = program.place / "secret" / "notes.txt"

    def link(name: str) -> Callable[[Path], None]:
        def replace(run: Path) -> None:
            if (run / name).is_dir():
                shutil.rmtree(run / name)
            (run / name).unlink(missing_ok=True)
            (run / name).symlink_to(secret.parent if name == "checkpoints" else secret)

        return replace

    cases: list[tuple[str, Callable[[Path], None], tuple[str, ...]]] = [
        ("report.html is a link", link("report.html"), ("--mode=report",)),
        (".lock is a link", link(".lock"), ("--mode=thresholds",)),
        ("metrics.jsonl is a link", link("metrics.jsonl"), COMMAND),
        ("checkpoints is a link", link("checkpoints"), COMMAND),
        ("results.json is a link", link("results.json"), ("--mode=report",)),
    ]
    for name, prepare, command in cases[:1] if quick else cases:
        run = program.place / "hostile"
        shutil.copytree(whole, run)
        secret.parent.mkdir()
        secret.write_text("precious")
        prepare(run)
        ended = program((*command, f"--workdir={run}"))
        page = run / "report.html"
        reason = ""
        if [(path, path.read_text()) for path in secret.parent.iterdir()] != [(secret, "precious")]:
            reason = "the file outside has changed"
        elif page.is_file() and any(word in page.read_text() for word in ("precious", "cHJlY2lvdX")):
            reason = "the file outside is in the report"
        elif ended.code not in (0, 2) or (ended.code and not ended.one_sentence) or not ended.quiet:
            reason = str(ended)
        yield "hostile", name, not reason, reason
        shutil.rmtree(run)
        shutil.rmtree(secret.parent)


# -------------------------------------------------------------------------------------------------------------- main
PARTS = {
    "kills": kills,
    "damage": damage,
    "disks": disks,
    "writers": writers,
    "hostile": hostile,
    "servers": servers,
    "people": people,
    "stale": stale,
    "together": together,
    "temporary": temporary,
    "workers": workers,
}


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
