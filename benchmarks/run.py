"""Measure this package on this machine: one table per suite, beside PyTorch if an interpreter has it.

    python -m benchmarks.run --suite=step --peer=PYTHON --json=step.json
    python -m benchmarks.run --suite=step,memory --batches=64 --resolutions=448 --models=ml-vpt@dinov2_vitl14
    python -m benchmarks.run --quick

Suites: step, memory, start, loop, overhead, data, limit, agreement, attention, kernels, mfu (default: all).
`--peer` is an interpreter with torch, transformers and torchvision; `--against` another interpreter with this package's
requirements, or another checkout of it, that takes part in the same rounds under the given name. With `--json`, results
are kept in a file, and what it holds is not measured again: the same command resumes where it stopped, and several runs
fill one table. Run nothing else meanwhile. The exit code is 3 if `--minutes` left no time for some rows.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import harness
from benchmarks.suites.cases import BY_PLATFORM, QUICK, Settings

SUITES = ("step", "memory", "start", "loop", "overhead", "data", "limit", "agreement", "attention", "kernels", "mfu")
MODES = ("train", "infer", "predict")
OUT_OF_TIME = 3  # exit code


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.run", description=__doc__.splitlines()[0])
    parser.add_argument("--suite", default=",".join(SUITES), help="suites, separated by commas")
    parser.add_argument("--peer", default="", help="interpreter with torch, transformers and torchvision")
    parser.add_argument("--no-compile", action="store_true", help="measure PyTorch eagerly only")
    parser.add_argument("--against", action="append", default=[], metavar="NAME=PYTHON[:CHECKOUT]")
    parser.add_argument("--json", type=Path, help="file that keeps the results")
    parser.add_argument("--again", action="store_true", help="measure again what the file holds")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing new after this time")
    parser.add_argument("--models", help="METHOD[@BACKBONE],…: ml-vpt, vpt, lora, q2l, dr-moe")
    parser.add_argument("--batches", help="images per step, separated by commas")
    parser.add_argument("--resolutions", help="sides in pixels, separated by commas")
    parser.add_argument("--dtypes", help="float32,bfloat16")
    parser.add_argument("--modes", help=f"of the suites step and memory: {','.join(MODES)}")
    parser.add_argument("--rounds", type=int, help="alternating rounds per case")
    parser.add_argument("--photos", type=Path, help="folder with JPEG files, for the suites loop and data")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does everything run?")
    parser.add_argument("--log", type=Path, help="file for what the measured processes print to stderr")
    return check(parser, parser.parse_args(words))


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> argparse.Namespace:
    """Return the options, or end with a message about a wrong option."""
    options.suite = options.suite.split(",")
    for name, allowed in (("suite", SUITES), ("modes", MODES)):
        values = getattr(options, name) or []
        for one in values.split(",") if isinstance(values, str) else values:
            if one not in allowed:
                parser.error(f"--{name}: {one!r} is not one of {', '.join(allowed)}")
    for text in options.against:
        if not all(text.partition("=")[::2]):
            parser.error(f"--against={text} should be NAME=PYTHON or NAME=PYTHON:CHECKOUT")
    if options.photos and not options.photos.is_dir():
        parser.error(f"--photos={options.photos} is not a folder")
    return options


def sides_of(options: argparse.Namespace) -> list[harness.Side]:
    """Return the sides: this checkout, then the checkouts of --against, then PyTorch."""
    sides = [harness.our_side("ours")]
    for text in options.against:
        name, _, place = text.partition("=")
        python, _, checkout = place.partition(":")
        sides.append(harness.our_side(name, python, Path(checkout or harness.ROOT).resolve()))
    if options.peer:
        sides.append(harness.torch_side(options.peer, compiled=False))
        if not options.no_compile:
            sides.append(harness.torch_side(options.peer, compiled=True))
    return sides


def settings_of(options: argparse.Namespace, platform: str) -> Settings:
    """Return the sizes to measure, from the options or else by platform."""
    sizes = dict(QUICK if options.quick else BY_PLATFORM[platform])
    for name, convert in (("models", str), ("batches", int), ("resolutions", int), ("dtypes", str)):
        if text := getattr(options, name):
            sizes[name] = tuple(convert(part) for part in text.split(","))
    modes = tuple((options.modes or ("train,infer,predict")).split(","))
    rounds = options.rounds or (1 if options.quick else 7)
    photos = options.photos and options.photos.resolve()
    return Settings(platform, **sizes, modes=modes, rounds=rounds, quick=options.quick, photos=photos)


def main(words: list[str] | None = None) -> int:
    """Run the suites and print their tables."""
    options = arguments(words)
    results = harness.Results(options.json, again=options.again, until=time.monotonic() + 60 * options.minutes)
    log = options.log.open("w") if options.log else subprocess.DEVNULL
    workers = harness.Workers(sides_of(options), log)
    try:
        facts = {side.name: workers.of(side).facts for side in workers.sides}
        print(", ".join(f"{value}" for value in results.machine.values()))
        for name, values in facts.items():
            print(f"{name}: {harness.describe_process(values)}")
        print()
        settings = settings_of(options, harness.platform_of(facts["ours"]))
        sides = workers.sides
        compared = [side for side in sides if harness.platform_of(facts[side.name]) == settings.platform]
        for side in (side for side in sides if side not in compared):
            print(f"{side.name} does not see the {settings.platform}: it takes part in the suite data only\n")
        if settings.platform == "tpu" and len(compared) > 1:
            raise harness.Failed("a TPU belongs to one process, so that --against cannot take part")
        for suite in options.suite:
            workers.sides = sides if suite == "data" else compared
            for text in importlib.import_module(f"benchmarks.suites.{suite}").run(settings, workers, results):
                print(text, end="\n" if text else "", flush=True)
    except harness.Failed as failed:
        print(f"benchmarks.run: {failed} (--log=FILE keeps what it printed)", file=sys.stderr)
        return 1
    finally:
        workers.close()
    if results.left_out:
        print(f"benchmarks.run: no time was left for {len(results.left_out)} rows", file=sys.stderr)
    return OUT_OF_TIME if results.left_out else 0


if __name__ == "__main__":
    sys.exit(main())
