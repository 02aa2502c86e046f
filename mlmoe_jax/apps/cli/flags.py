"""The flags of the command line beside `--config.KEY=VALUE`: those of some modes only, and how all are read."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from mlmoe_jax.apps.export.catalog import TARGETS
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import DEMO, HUB
from mlmoe_jax.runtime.version import __version__

# Mode -> its sentence in --help.
MODES = {
    "train": "train a model, or resume its training, and evaluate it (the default)",
    "eval": "evaluate a trained model again; results go to eval/ in its run folder",
    "thresholds": "fit the thresholds of a trained model to the scores of a split",
    "predict": "label images",
    "serve": "label images over HTTP and on a web page",
    "report": "write one HTML page about a run",
    "compare": "compare the results of two runs",
    "reproduce": "train the rows of a published table and print them beside its numbers",
    "summary": "count parameters, multiply-adds and memory; nothing is trained",
    "compile": "compile the steps for a device or a TPU slice, and tell whether they fit",
    "data": "check the images and labels of a data set",
    "pack": "write a data set as a few large files",
    "features": "write the features of a backbone",
    "prune": "train, prune the prompts, and train again (E2VPT)",
    "import": "make a run folder of a checkpoint of the authors' code",
    "export": "write a trained model for use without this package",
    "push": "share a trained model on the Hugging Face hub",
}

# What modes cannot do without: mode -> flag -> what to write after it.
CONFIG_FILE = "FILE, such as --config=configs/mlvpt_digits.py"
NEEDS: dict[str, dict[str, str]] = {
    "eval": {"workdir": "FOLDER"},
    "thresholds": {"workdir": "FOLDER"},
    "predict": {"workdir": "FOLDER", "images": "FOLDER or image files"},
    "serve": {"workdir": "FOLDER"},
    "report": {"workdir": "FOLDER"},
    "compare": {"workdir": "FOLDER twice, once for each run"},
    "export": {"workdir": "FOLDER", "output": "FILE, a .safetensors or .npz file, or a folder with --format"},
    "push": {"workdir": "FOLDER", "repo": "USER/NAME, the name that the model gets on the hub"},
    "compile": {"config": CONFIG_FILE},
    "data": {"config": CONFIG_FILE},
    "prune": {"config": CONFIG_FILE},
    "import": {"config": CONFIG_FILE},
    "pack": {"config": CONFIG_FILE, "output": "FOLDER, a folder or an address such as gs://bucket/folder"},
    "features": {"config": CONFIG_FILE, "output": "FOLDER"},
}
# Modes without a --config, and where theirs is from; modes without config keys.
CONFIG_FROM = {mode: "its config from the run folder" for mode, needs in NEEDS.items() if "config" not in needs} | {
    "reproduce": "its configs from --table"
}
WITHOUT_KEYS = ("compare", "report", "push")

# Modes that only read their --workdir, so that it may be on the hub or part of the package.
READING, ELSEWHERE = ("predict", "serve", "export"), (HUB, DEMO)

# Flags of some modes only: flag -> (modes, help, further arguments of `add_argument`).
FLAGS: dict[str, tuple[tuple[str, ...], str, dict[str, Any]]] = {
    "verbose": (("train", "prune", "eval"), "print all metrics, not only the main ones", {"action": "store_true"}),
    "sweep": (
        ("train",),
        "config.KEY=VALUE,VALUE,…, or config=NAME,NAME,… for several configs; repeat for a grid",
        {"action": "append", "default": []},
    ),
    "profile": (
        ("train",),
        "START:STOP, the first and the last step to trace into the run folder; prints the most expensive operations",
        {"default": ""},
    ),
    "table": (
        ("reproduce",),
        "the table or figure of a paper, such as mlvpt.1, drmoe.2 or mlvpt.fig3",
        {"default": ""},
    ),
    "only": (("reproduce",), "the rows with these settings, separated by commas: ML-VPT,dinov2*", {"default": ""}),
    "dataset": (("reproduce",), "another data set for all rows, such as digits", {"default": ""}),
    "root": (("reproduce",), "the folder of the data set, or DATASET=FOLDER,DATASET=FOLDER", {"default": ""}),
    "seeds": (("reproduce",), "seeds to repeat every run with, such as 0,1,2", {"default": ""}),
    "dry-run": (("reproduce",), "print the commands of all runs, and train nothing", {"action": "store_true"}),
    "images": (
        ("predict",),
        "image files, folders, quoted patterns such as 'photos/**/*.jpg', @FILE with one path per line, - for paths on "
        "stdin",
        {"nargs": "+", "default": []},
    ),
    "format": (
        ("export",),
        "stablehlo or onnx (a folder with a program and its labels), safetensors (a file with our parameter paths), or "
        "official (a .safetensors or .npz file with the names of the authors' code; default for such an --output)",
        {"choices": tuple(TARGETS)},
    ),
    "include-frozen": (
        ("export",),
        "of --format=safetensors: always (all frozen weights; default), auto (those that no published file has), never",
        {"choices": ("always", "auto", "never"), "default": "always"},
    ),
    "init-from": (
        ("train", "prune", "import"),
        "the same as --config.init_from: another run folder, a model on the hub such as hf:user/name, or a checkpoint "
        "of the authors' code",
        {"default": ""},
    ),
    "repo": (("push",), "the name of the model on the hub, USER/NAME", {"default": ""}),
    "revision": (("push",), "a branch to push to (default: main)", {"default": ""}),
    "private": (("push",), "show the model to its owner only", {"action": "store_true"}),
    "license": (("push",), "the license of the trained values for the model card, such as apache-2.0", {"default": ""}),
    "checkpoint": (
        ("eval", "predict", "export", "serve"),
        "best (the selected weights; default), latest (the weights at the end of the newest checkpoint), or the step "
        "of a checkpoint",
        {"default": "best"},
    ),
    "top-k": (("predict",), "the number of labels per image, instead of thresholds", {"type": int}),
    "gates": (("predict",), "write the values of the gates too, as JSON lines", {"action": "store_true"}),
    "batch-size": (("predict",), "the number of images per batch", {"type": int}),
    "host": (("serve",), "the address to listen on", {"default": "127.0.0.1"}),
    "port": (("serve",), "the port to listen on; 0 takes a free one", {"type": int, "default": 8000}),
    "split": (("compare",), "one split (default: all that both runs have)", {}),
    "against": (("report",), "another run folder to compare with", {}),
    "cost": (("report",), "count parameters and multiply-adds (takes seconds)", {"action": "store_true"}),
    "sample": (("data",), "the number of images to inspect per split (default: all)", {"type": int, "default": 0}),
    "configs": (("summary",), "several configs, separated by commas", {"default": ""}),
    "topology": (("compile",), "a TPU slice such as v5e:16x16 (default: the devices of this host)", {"default": ""}),
    "find-batch": (("compile",), "find the largest batch per device that fits", {"action": "store_true"}),
    "labels": (("compile",), "the number of labels (default: that of the data set)", {"type": int, "default": 0}),
    "quick": (("compile",), "use the lowest optimization level, in a fraction of the time", {"action": "store_true"}),
    "output": (
        ("predict", "compare", "report", "pack", "export", "features", "push"),
        "a .csv or .jsonl file, - for stdout (predict; default: stdout with --json, otherwise predictions.csv, or with "
        "--gates predictions.jsonl, in the run folder or, for hf: and demo:, in the working directory); a .csv or "
        ".json file (compare); an .html file (report; default: report.html in the run folder); a folder (pack, "
        "features); see --format (export); a folder for what would be uploaded, to look at it first (push)",
        {},
    ),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"{message}; see --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m mlmoe_jax.main",
        usage="%(prog)s [--mode=MODE] [--config=FILE] [--config.KEY=VALUE …] [--workdir=FOLDER] …",
        description="Multi-label image classification.\n\nmodes:\n"
        + "\n".join(f"  {name:<11} {sentence}" for name, sentence in MODES.items()),
        epilog="Every config key can be set with --config.SECTION.KEY=VALUE. --help=config lists the sections,\n"
        "--help=optim explains the keys of a section, --help=optim.learning_rate explains one key.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mlmoe_jax {__version__}", help="print the version")
    parser.add_argument("--mode", choices=tuple(MODES), default="train", metavar="MODE", help="one of the modes above")
    parser.add_argument("--config", action="append", default=[], help="config file or its name, with :key=value,…")
    parser.add_argument(
        "--workdir",
        action="append",
        default=[],
        help="run folder (compare: twice; train: runs/…); predict, serve and export also take hf:USER/NAME[@REVISION] "
        "and demo:photographs",
    )
    for name, (of_modes, text, options) in FLAGS.items():
        parser.add_argument(f"--{name}", help=f"{', '.join(of_modes)}: {text}", **options)
    parser.add_argument("--json", action="store_true", help="print results as JSON with all digits")
    return parser


def parse_flags(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[tuple[str, str]]]:
    """Return the flags and the overrides ("section.key", "text") of a command.

    Raises UserError for unknown, missing, repeated and misplaced flags.
    """
    plain, overrides, rest = [], [], list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--config."):
            plain.append(word)
            continue
        key, equals, value = word.removeprefix("--config.").partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise UserError(f"{word} has no value; write {word}=VALUE")
            value = rest.pop(0)
        overrides.append((key, value))
    parser = _parser()
    flags = parser.parse_args(plain)
    for name in ("config", "workdir"):
        values, twice = getattr(flags, name), (flags.mode, name) == ("compare", "workdir")
        if len(values) > 1 + twice:
            raise UserError(f"--{name} is given {len(values)} times; give it {'twice' if twice else 'once'}")
        if not twice:
            setattr(flags, name, values[0] if values else None)
        elif len(values) == 1:
            flags.workdir = None  # one of two is as good as none
    for name, (of_modes, _, _) in FLAGS.items():
        attribute = name.replace("-", "_")
        if flags.mode not in of_modes and getattr(flags, attribute) != parser.get_default(attribute):
            raise UserError(f"--{name} is for --mode={' and '.join(of_modes)}; leave it out of --mode={flags.mode}")
    _require_what_the_mode_takes(flags, overrides)
    if flags.init_from:
        overrides.append(("init_from", flags.init_from))
    return flags, overrides


def _require_what_the_mode_takes(flags: argparse.Namespace, overrides: list[tuple[str, str]]) -> None:
    mode = flags.mode
    if mode in CONFIG_FROM and flags.config is not None:
        raise UserError(f"--mode={mode} takes {CONFIG_FROM[mode]}; leave --config out")
    if mode in WITHOUT_KEYS and overrides:
        raise UserError(f"--mode={mode} takes no config keys; leave --config.{overrides[0][0]} out")
    if missing := [f"--{name}={what}" for name, what in NEEDS.get(mode, {}).items() if not getattr(flags, name)]:
        raise UserError(f"--mode={mode} needs {missing[0]}")
    if mode == "summary" and bool(flags.config) == bool(flags.configs):
        raise UserError("--mode=summary needs either --config=FILE or --configs=FILE,FILE,…")
    if mode not in READING and any(map(is_shared, flags.workdir if mode == "compare" else (flags.workdir or "",))):
        raise UserError(
            f"--workdir={'… or '.join(ELSEWHERE)}… is for --mode={', '.join(READING)}; for {mode}, download a "
            "model with `hf download USER/NAME --local-dir=FOLDER` and set --workdir=FOLDER"
        )


def is_shared(location: str) -> bool:
    """Return whether a --workdir is a model that is only read: on the hub, or part of the package."""
    return location.startswith(ELSEWHERE)
