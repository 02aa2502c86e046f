"""Give every reader of the package damaged or hostile inputs, and count the cases that do not end well.

    python -m tools.fuzz --cases=20000 --seed=0 --json=fuzz.json
    python -m tools.fuzz --cases=300 --groups="tables,images"

A case ends well if it succeeds, or fails with one sentence (`UserError`), within 5 seconds, with less than 1 GB of
further memory, and without a file outside its folder. In the group "own input", all that a table or folder of a user
holds has to be used, or to be said (tools/fuzz/account.py); otherwise the case is silent. Cases are drawn by hypothesis
in batches; a batch is repeated by its seed. They run in a child process, which is replaced if it hangs or dies.
"""

import argparse
import collections
import contextlib
import functools
import hashlib
import json
import math
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from mlmoe_jax.runtime.table import Table

SECONDS, BYTES = 5.0, 1_000_000_000  # CPU time and memory of the process, so that a busy machine has no effect
WAIT = 12 * SECONDS  # wall time
BATCH = 50
DEAD = 400.0  # seconds without an answer, after which the child is replaced; training a run may take 200
HEADROOM = 6 * BYTES  # further address space of the child after its first case, so that no case fills the machine
OUTCOMES = ("silent", "uncaught", "hang", "memory", "outside")
REPOSITORY = Path(__file__).resolve().parents[2]
PROGRESS = 15.0  # seconds between two lines about the progress


class Hang(BaseException):
    """A case took longer than WAIT."""


# ------------------------------------------------------------------------------------------------------------ the child
def child(groups: list[str], cases: dict[str, int], seed: int, start: int, place: Path) -> None:
    """Run the batches from number `start` on; write a line of JSON per batch and case."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    warnings.simplefilter("ignore")
    from tools.fuzz.groups import GROUPS

    signal.signal(signal.SIGALRM, _raise_hang)
    number = 0
    for name in groups:
        group, base = GROUPS[name], place / "bases" / group_folder(GROUPS, name)
        total = 0
        while total < cases[name]:
            count = min(BATCH, cases[name] - total)
            total, number = total + count, number + 1
            if number <= start:
                continue
            answers.write(json.dumps({"batch": number, "group": name}) + "\n")
            if not base.exists():
                base.mkdir(parents=True)
                group.prepare(base)

            once = functools.partial(_answer, group, base, place, answers, name)
            _draw(once, count, f"{seed} {name} {total}")


def _draw(act: Callable, count: int, seed: str) -> None:
    """Call `act` with the draw function of each of `count` examples."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded
    from hypothesis import strategies as st

    @seeded(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4]))
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def batch(data):
        act(data.draw)

    batch()


def _answer(group, base: Path, place: Path, answers: TextIO, name: str, draw: Callable) -> None:
    with _limited_memory():
        answer = _case(lambda folder: group.draw(draw, base, folder), place)
    answers.write(json.dumps(answer | {"group": name}) + "\n")


def group_folder(groups, name: str) -> str:
    """Return the folder with the inputs of a group, shared by groups with equal preparation."""
    prepare = groups[name].prepare
    return next(other for other, group in groups.items() if group.prepare is prepare).replace(" ", "_")


def _raise_hang(*_: object) -> None:
    raise Hang


@contextlib.contextmanager
def _limited_memory():
    resource.setrlimit(resource.RLIMIT_DATA, (_memory("VmData") + HEADROOM, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _memory(kind: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{kind}:")[1].split()[0]) * 1024


def _case(make, place: Path) -> dict[str, object]:
    """Run one case in an empty folder; return its outcome, None if it ended well."""
    from mlmoe_jax.errors import UserError
    from tools.fuzz.hostile import Silent

    for name in ("case", "outside"):
        shutil.rmtree(place / name, ignore_errors=True)
        (place / name).mkdir()
    precious = place / "outside" / "precious"
    precious.write_text("precious")
    os.chdir(place / "outside")
    what, act = make(place / "case")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark of the memory
    before, started, outcome, detail = _memory("VmRSS"), time.process_time(), None, ""
    signal.setitimer(signal.ITIMER_REAL, WAIT)
    try:
        act()
    except UserError as error:
        detail = str(error)
    except Silent as error:
        outcome, detail = "silent", str(error)
    except Hang:
        outcome, detail = "hang", "".join(traceback.format_exc().splitlines(True)[-6:])
    except BaseException as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "mlmoe_jax" in f.filename]
        at = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        outcome, detail = "uncaught", f"{type(error).__name__} at {at}: {error}"[:300]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    seconds, memory = time.process_time() - started, _memory("VmHWM") - before
    if outcome is None and memory > BYTES:
        outcome, detail = "memory", f"{memory / 1e6:.0f} MB"
    if outcome is None and seconds > SECONDS:
        outcome, detail = "hang", f"{seconds:.1f} s"
    if (
        sorted(path.name for path in (place / "outside").iterdir()) != ["precious"]
        or precious.read_text() != "precious"
    ):
        outcome, detail = "outside", "a file was written outside the folder of the case"
    return {"outcome": outcome, "detail": detail, "what": what, "seconds": seconds, "memory": memory}


# ----------------------------------------------------------------------------------------------------------- the parent
def run(cases: int, seed: int, groups: list[str]) -> list[dict[str, object]]:
    """Run at least `cases` cases, shared among the groups; return one answer per case."""
    from tools.fuzz.groups import GROUPS

    groups = groups or list(GROUPS)
    whole = sum(GROUPS[name].share for name in groups)
    counts = {name: math.ceil(cases * GROUPS[name].share / whole) for name in groups}
    answers, batch, group, shown = [], 0, groups[0], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        while True:
            command = [sys.executable, "-m", "tools.fuzz", f"--cases={json.dumps(counts)}", f"--seed={seed}"]
            variables = {"MLMOE_CACHE": f"{folder}/cache", "JAX_PLATFORMS": "cpu", "HOME": f"{folder}/home"}
            variables["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
            process = subprocess.Popen(
                [*command, f"--child={batch}", f"--place={folder}"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | variables,
            )
            for answer in _lines(process):
                if "batch" in answer:
                    batch, group = answer["batch"], answer["group"]
                else:
                    answers.append(answer)
                if time.monotonic() > shown + PROGRESS:
                    shown = time.monotonic()
                    failures = sum(1 for answer in answers if answer["outcome"])
                    print(f"{len(answers):,} cases, {failures:,} failures, now {group}", file=sys.stderr, flush=True)
            if process.wait() == 0:
                return answers
            detail = f"the process ended with {process.returncode} in batch {batch}"
            answers.append(
                {"group": group, "outcome": "hang", "detail": detail, "what": "", "seconds": DEAD, "memory": 0}
            )
            if process.returncode == 1:  # an error of this program, not of the package
                print(f"{detail}: {' '.join(command)} --place=FOLDER shows why", file=sys.stderr)
                return answers


def _lines(process: subprocess.Popen):
    """Yield the answers of the child; kill it if there is no answer for DEAD seconds."""
    rest = b""
    while True:
        ready, _, _ = select.select([process.stdout], [], [], DEAD)
        if not ready:
            process.kill()
            return
        read = os.read(process.stdout.fileno(), 1 << 16)
        if not read:
            return
        *lines, rest = (rest + read).split(b"\n")
        yield from map(json.loads, lines)


def table(answers: list[dict[str, object]]) -> str:
    """Return one line per group: cases, each kind of failure, the slowest case and the most memory."""
    rows = []
    names = list(dict.fromkeys(answer["group"] for answer in answers))
    for name in [*names, "all"]:
        members = [answer for answer in answers if name in ("all", answer["group"])]
        counted = collections.Counter(answer["outcome"] for answer in members)
        refused = sum(1 for answer in members if answer["outcome"] is None and answer["detail"])
        slowest, most = max(answer["seconds"] for answer in members), max(answer["memory"] for answer in members)
        failures = [str(counted[outcome]) for outcome in OUTCOMES]
        rows.append((name, len(members), *failures, refused, f"{slowest:.1f} s", f"{most / 1e6:.0f} MB"))
    return Table(("group", "cases", *OUTCOMES, "refused", "slowest", "most memory"), rows).text()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="20000", help="the number of cases in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--groups", default="", help="names, separated by commas (default: all)")
    parser.add_argument("--json", default="", help="a file for all cases that did not end well")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        counts = json.loads(options.cases)
        child(list(counts), counts, options.seed, options.child, options.place)
        return 0
    answers = run(int(options.cases), options.seed, [name for name in options.groups.split(",") if name])
    failures = [answer for answer in answers if answer["outcome"]]
    print(table(answers))
    kinds = collections.Counter((a["group"], a["outcome"], a["detail"][:120]) for a in failures)
    for (group, outcome, detail), count in kinds.most_common(60):
        print(f"{count:6} {group}: {outcome}: {detail}")
    if options.json:
        Path(options.json).write_text(json.dumps({"cases": len(answers), "failures": failures}, indent=1))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
