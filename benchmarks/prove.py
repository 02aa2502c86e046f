"""Prove on an accelerator what the documentation says: one page and one JSON about numbers, speed and memory.

    bash launch/prove.sh                                     # at most 40 minutes on one H100 or a v5e-8
    bash launch/prove.sh --short --minutes=8                 # tiny sizes on a CPU: does everything run?
    bash launch/prove.sh --minutes=10 --parts=agreement,step,mfu,memory,attention,data --peer=PYTHON
    bash launch/prove.sh --voc2007=ROOT                      # also three rows of ML-VPT, table 2, with three seeds
    bash launch/prove.sh --coco=ROOT --checkpoint=FILE       # also the authors' checkpoint on val2014
    bash launch/prove.sh --photos=ROOT --names=FILE          # also zero-shot mAP on VOC 2007, by a list of its labels

Each part is a process of its own with a share of `--minutes`, and time that a part leaves is for the next parts. The
most important parts come first: does the step agree with the CPU, how fast is it (with `--peer` beside PyTorch), the
largest batch, attention, the host. The rows of papers take their own time. `--out` gets proof.md, proof.json, and the
logs of the parts. Rerun the command to repeat the parts that failed or were out of time; the other parts are read.
Nothing is downloaded, except for weights that a row of a paper needs. The exit code is 1 if a part failed or was out of
time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.proof import PARTS, Outcome, Part, Setup, parts_of
from benchmarks.report import progress
from benchmarks.run import OUT_OF_TIME
from mlmoe_jax.runtime.storage import Folder

GRACE = 15.0  # seconds between SIGTERM, after which a training saves a checkpoint, and SIGKILL
FINISHED, UNFINISHED = ("passed", "measured"), ("failed", "out of time", "not run")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; end with a message about a wrong option."""
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(prog="launch/prove.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/proof"), help="folder of the results")
    parser.add_argument("--minutes", type=float, default=40.0, help="budget of all parts but the rows of papers")
    parser.add_argument("--short", action="store_true", help="tiny sizes: does everything run?")
    parser.add_argument("--parts", default=",".join(names), help="some of %(default)s")
    parser.add_argument("--peer", default="", help="interpreter with torch, transformers and torchvision")
    parser.add_argument("--voc2007", type=Path, metavar="ROOT", help="folder of VOC 2007")
    parser.add_argument("--coco", type=Path, metavar="ROOT", help="folder of COCO 2014")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="the authors' checkpoint of ML-VPT on COCO")
    parser.add_argument("--photos", type=Path, metavar="ROOT", help="folder of VOC 2007, labeled by --names alone")
    parser.add_argument("--names", type=Path, metavar="FILE", help="list of its labels, each with descriptions or none")
    options = parser.parse_args(words)
    for name in ("voc2007", "coco", "checkpoint", "photos", "names"):
        if (path := getattr(options, name)) and not path.exists():
            parser.error(f"--{name}={path} does not exist")
        setattr(options, name, path and path.resolve())
    if (options.coco is None) != (options.checkpoint is None):
        parser.error("--coco and --checkpoint belong together; give both")
    if options.peer:
        if shutil.which(options.peer) is None:
            parser.error(f"--peer={options.peer} is not a program")
        options.peer = os.path.abspath(shutil.which(options.peer))
    if (options.photos is None) != (options.names is None):
        parser.error("--photos and --names belong together; give both")
    if options.minutes <= 0:
        parser.error(f"--minutes={options.minutes} is not positive")
    if unknown := {*options.parts.split(",")} - {*names}:
        parser.error(f"--parts: {min(unknown)!r} is not one of {', '.join(names)}")
    return options


# --------------------------------------------------------------------------------------------------------- one part
def execute(part: Part, setup: Setup, seconds: float) -> Outcome:
    """Run a part in a process of its own, and end it with all its children after some seconds."""
    began, output, log = time.monotonic(), setup.parts / f"{part.name}.out", setup.parts / f"{part.name}.log"
    with output.open("w") as out, log.open("w") as errors:
        options = {"cwd": harness.ROOT, "env": harness.our_side("ours").environment, "start_new_session": True}
        process = subprocess.Popen(part.command(setup, seconds), stdout=out, stderr=errors, **options)
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process)
    messages = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = messages[-1][:300] if messages else "it printed no message"
    if code is None:
        outcome = Outcome("out of time", f"it did not end within {minutes(seconds)} minutes; its last message: {last}")
    elif code not in (0, OUT_OF_TIME):
        outcome = Outcome("failed", f"exit code {code}: {last}")
    else:
        try:
            outcome = part.read(setup, output.read_text(), code)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            outcome = Outcome("failed", f"its results cannot be read: {type(error).__name__}: {error}")
    outcome.seconds = time.monotonic() - began
    return outcome


def end_group(process: subprocess.Popen) -> None:
    """End a process and its children; a process that a driver holds is left behind."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE)


def minutes(seconds: float) -> str:
    """Return seconds as minutes: 0.4, 12."""
    return f"{seconds / 60:.1f}" if seconds < 570 else f"{seconds / 60:.0f}"


# ------------------------------------------------------------------------------------------------------------ state
@dataclass
class Proof:
    """The outcomes of all parts so far, in proof.json.

    Attributes:
      about: the machine, the code and the sizes, which are equal for all parts of a proof.
      outcomes: name of a part -> its outcome.
    """

    folder: Path
    about: dict[str, str]
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, about: dict[str, str]) -> Proof:
        """Return the proof in a folder, or a new proof; SystemExit if it is about something else."""
        file = folder / "proof.json"
        if not file.exists():
            return cls(folder, about)
        stored = json.loads(file.read_text())
        if differs := [name for name in about if stored["about"].get(name) != about[name]]:
            print(f"error: {file} has other {differs[0]}; name another folder with --out", file=sys.stderr)
            raise SystemExit(2)
        return cls(folder, about, {name: Outcome(**values) for name, values in stored["parts"].items()})

    def verdict(self, part: Part) -> str:
        """Return the verdict of a part."""
        return self.outcomes[part.name].verdict if part.name in self.outcomes else "not run"

    def write(self, parts: Sequence[Part]) -> None:
        """Write both files, each whole."""
        whole = {"about": self.about, "parts": {name: vars(outcome) for name, outcome in self.outcomes.items()}}
        for name, text in (("proof.json", json.dumps(whole, indent=1) + "\n"), ("proof.md", self.page(parts))):
            Folder(self.folder).write_text(name, text)

    def page(self, parts: Sequence[Part]) -> str:
        """Return the Markdown page: the machine, a verdict per part, and the tables of each part."""
        counts = [self.verdict(part) for part in parts]
        counted = [f"{counts.count(one)} {one}" for one in (*FINISHED, *UNFINISHED) if one in counts]
        today = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        lines = [f"# Proof on {self.about['devices']}", "", f"**{', '.join(counted)},** written {today}. A part with a"]
        lines[-1] += " stated bound passes or fails; other parts are measured."
        lines += ["", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in self.about.items()), ""]
        lines += ["| part | verdict | result | minutes |", "|---|---|---|---:|"]
        for part in parts:
            one = self.outcomes.get(part.name, Outcome("not run", ""))
            verdict = one.verdict if one.verdict in FINISHED else f"**{one.verdict}**"
            lines.append(f"| {part.name} | {verdict} | {one.result.replace('|', '/')} | {minutes(one.seconds)} |")
        for part in parts:
            lines += ["", f"## {part.name}", "", part.about]
            if tables := self.outcomes.get(part.name, Outcome("", "")).tables:
                lines += ["", tables.strip()]
        return "\n".join(lines) + "\n"


def describe(facts: dict[str, Any], *, short: bool, peer: str = "") -> dict[str, str]:
    """Return what the head of the page says, by name."""
    host, git = harness.machine(), ["git", "-C", str(harness.ROOT)]
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    commit, changes = (
        subprocess.run([*git, *words], capture_output=True, text=True, check=False).stdout.strip()
        for words in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain"])
    )
    return {
        "devices": f"{len(facts['devices'])} × {facts['devices'][0]}",
        "runtime": facts["runtime"],
        "known errors": facts.get("known_errors") or "none of this JAX version on this device",
        "host": f"{host['processor']}, {host['cores']} cores, {host['memory_gb']} GB, {host['system']}",
        "versions": f"Python {sys.version.split()[0]}, {packages}",
        "commit": f"{commit or 'unknown'}{', with changes' if changes else ''}",
        "sizes": "tiny (--short); the speeds mean nothing" if short else "full",
        "peer": peer or "none",
    }


# ----------------------------------------------------------------------------------------------------------- the run
def run_parts(proof: Proof, parts: Sequence[Part], setup: Setup, budget: float) -> None:
    """Run the unfinished parts, and write the page after each part.

    Args:
      budget: seconds. A part may take its share and what the parts before it left.
    """
    pending = [part for part in parts if proof.verdict(part) not in FINISHED]
    shares, until = sum(part.share(setup) for part in pending if not part.own_time), time.monotonic()
    for part in pending:
        seconds = 60 * part.minutes
        if not part.own_time:
            until += budget * part.share(setup) / shares
            seconds = max(1.0, until - time.monotonic())
        if proof.verdict(part) == "failed":
            (setup.parts / f"{part.name}.json").unlink(missing_ok=True)  # rows of a suite, of which some have failed
        progress(f"{part.name}, at most {minutes(seconds)} minutes")
        proof.outcomes[part.name] = outcome = execute(part, setup, seconds)
        proof.write(parts)
        progress(f"  {outcome.verdict}: {outcome.result}")


def main(words: Sequence[str] | None = None) -> int:
    """Run the parts and print the path of the page."""
    options = arguments(words)
    data = {name: getattr(options, name) for name in ("voc2007", "coco", "checkpoint", "photos", "names")}
    setup = Setup(options.out.resolve(), options.short, options.peer, **data)
    setup.parts.mkdir(parents=True, exist_ok=True)
    first = PARTS[0]
    parts = parts_of(setup, [first.name, *options.parts.split(",")])
    devices = execute(first, setup, 60 * first.minutes)
    if devices.verdict != "measured":
        print(f"error: the devices cannot be used: {devices.result}", file=sys.stderr)
        page = Proof(setup.out, {"devices": "a machine without a usable device"}, {first.name: devices}).page(parts)
        (setup.out / "proof.md").write_text(page)
        return 1
    setup.facts = devices.rows
    if harness.platform_of(setup.facts) == "cpu" and not setup.short:
        print("error: JAX sees no accelerator; install the extra cuda or tpu, or give --short", file=sys.stderr)
        return 2
    proof = Proof.open(setup.out, describe(setup.facts, short=setup.short, peer=setup.peer))
    proof.outcomes[first.name] = devices
    proof.write(parts)
    try:
        run_parts(proof, parts, setup, 60 * options.minutes - devices.seconds)
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        return 130
    print(setup.out / "proof.md")
    return 0 if all(proof.verdict(part) in FINISHED for part in parts) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
