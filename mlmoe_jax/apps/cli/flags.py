"""The flags of the command line besides `--config.KEY=VALUE`: their modes, help texts, parsing and checks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from mlmoe_jax.apps.export.catalog import TARGETS, TEMPLATES
from mlmoe_jax.data.sources.formats import FORMATS
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import DEMO, HUB
from mlmoe_jax.runtime.registry import nearest, suggestion
from mlmoe_jax.runtime.version import __version__

# Purpose -> mode -> its sentence in --help.
PURPOSES = {
    "Train": {
        "train": "train a model, or resume its training, and evaluate it (the default)",
        "prune": "train, prune the prompts, and train again (E2VPT)",
        "reproduce": "train the rows of a published table and print them beside its numbers",
        "import": "make a run folder of a checkpoint of the authors' code",
    },
    "Look at a trained model": {
        "eval": "evaluate a trained model again; results go to eval/ in its run folder",
        "thresholds": "fit the thresholds of a trained model to the scores of a split",
        "calibrate": "correct the scores of a trained model, fitted to a split, so that 0.7 means 70 %",
        "report": "write one HTML page about a run",
        "compare": "compare the results of two runs",
    },
    "Use a trained model": {
        "predict": "label images",
        "serve": "label images over HTTP and on a web page",
        "export": "write a trained model for use without this package",
        "push": "share a trained model on the Hugging Face hub",
    },
    "Prepare": {
        "data": "check the images and labels of a data set",
        "pack": "write a data set as a few large files, or its labels for a labeling tool",
        "features": "write the features of a backbone",
        "summary": "count parameters, multiply-adds and memory; nothing is trained",
        "compile": "compile the steps for a device or a TPU slice, and tell whether they fit",
    },
}
MODES = {mode: sentence for modes in PURPOSES.values() for mode, sentence in modes.items()}

# Required flags: mode -> flag -> description of its value.
CONFIG_FILE = "FILE, such as --config=configs/mlvpt_digits.py"
NEEDS: dict[str, dict[str, str]] = {
    **{mode: {"workdir": "FOLDER"} for mode in ("eval", "thresholds", "calibrate", "serve", "report")},
    **{mode: {"config": CONFIG_FILE} for mode in ("train", "compile", "data", "prune", "import")},
    "predict": {"workdir": "FOLDER", "images": "FOLDER or image files"},
    "compare": {"workdir": "FOLDER twice, once for each run"},
    "export": {"workdir": "FOLDER", "output": "FILE, a .safetensors or .npz file, or a folder with --format"},
    "push": {"workdir": "FOLDER", "repo": "USER/NAME, the name that the model gets on the hub"},
    "pack": {"config": CONFIG_FILE, "output": "FOLDER, a folder or an address such as gs://bucket/folder"},
    "features": {"config": CONFIG_FILE, "output": "FOLDER"},
}
# Modes that have no run folder.
WITHOUT_FOLDER = ("summary", "compile", "data", "pack", "features")
# The source of the config in modes without a --config, if it is not the run folder.
CONFIGS_FROM = {"reproduce": "--table", "train": "--sweep"}
WITHOUT_KEYS = ("compare", "report", "push")

# Modes that only read their --workdir, so that it may be on the hub or part of the package.
READING, ELSEWHERE = ("predict", "serve", "export"), (HUB, DEMO)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return int(text)


# Mode -> description of --output.
OUTPUTS = {
    "predict": "a .csv or .jsonl file, a file or folder of the --format, or - for stdout (default: stdout with --json, "
    "otherwise predictions.csv, selected.csv with --select, or with --gates .jsonl, in the run folder or, for hf: and "
    "demo:, in the working directory)",
    "compare": "a .csv or .json file",
    "report": "an .html file (default: report.html in the run folder)",
    "pack": "a folder, an address such as gs://bucket/folder, or a file or folder of the --format with {split}",
    "features": "a folder",
    "data": "of --audit: a folder (default: audit)",
    "export": "a .safetensors or .npz file, or a folder with --format",
    "push": "a folder for the files to inspect them; nothing is uploaded",
}

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
    "table": (("reproduce",), "the table or figure of a paper, such as mlvpt.1 or mlvpt.fig3", {"default": ""}),
    "only": (("reproduce",), "the rows with these settings, separated by commas: ML-VPT,dinov2*", {"default": ""}),
    "dataset": (("reproduce",), "another data set for all rows, such as digits", {"default": ""}),
    "root": (("reproduce",), "the folder of the data set, or DATASET=FOLDER,DATASET=FOLDER", {"default": ""}),
    "seeds": (("reproduce",), "seeds to repeat every run with, such as 0,1,2", {"default": ""}),
    "dry-run": (("reproduce",), "print the commands of all runs, and train nothing", {"action": "store_true"}),
    "images": (
        ("predict", "export"),
        "image files, folders, quoted patterns such as 'photos/**/*.jpg', @FILE with one path per line, - for paths on "
        "stdin; in export, images for --format=onnx_int8 in place of training images",
        {"nargs": "+", "default": []},
    ),
    "format": (
        ("export", "predict", "pack"),
        "for export: stablehlo or onnx (a folder with a program and its labels), onnx_float16 or onnx_int8 (a smaller "
        "program), safetensors (a file with our parameter paths), peft (a folder that PEFT loads onto a model of "
        "transformers), or official (a .safetensors or .npz file with the names of the authors' code; default for such "
        "an --output); for predict and pack: label_studio or fiftyone (.json), cvat (.xml), sidecar (a folder with a "
        "text file of tags per image), or wd_tagger (such a folder with selected_tags.csv)",
        {"choices": (*TARGETS, *FORMATS)},
    ),
    "include-frozen": (
        ("export",),
        "of --format=safetensors: always (all frozen weights; default), auto (unpublished frozen weights), never",
        {"choices": ("always", "auto", "never"), "default": "always"},
    ),
    "calibration-images": (
        ("export",),
        "the number of images for --format=onnx_int8 (default: 250); a fifth of them is only compared",
        {"type": _count},
    ),
    "merge": (("export",), "make adapters part of the weights of the backbone", {"action": "store_true"}),
    "template": (
        ("export",),
        "files to add to the folder of a program: mlflow (MLflow loads it), space (a Space of the Hugging Face hub)",
        {"choices": tuple(TEMPLATES)},
    ),
    "init-from": (
        ("train", "prune", "import"),
        "short for --config.init_from: another run folder, a model on the hub such as hf:user/name, a folder of PEFT, "
        "or a checkpoint of the authors' code",
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
    "top-k": (("predict",), "the number of labels per image, instead of thresholds", {"type": _count}),
    "gates": (("predict",), "write the values of the gates too, as JSON lines", {"action": "store_true"}),
    "select": (
        ("predict",),
        "choose --count of the images without labels to label next, from the uncertainty of their scores (uncertain), "
        "the distances of their features (diverse), or both",
        {"choices": ("uncertain", "diverse", "both")},
    ),
    "count": (("predict",), "the number of images that --select chooses", {"type": _count}),
    "batch-size": (("predict",), "the number of images per batch", {"type": _count}),
    "host": (("serve",), "the address to listen on", {"default": "127.0.0.1"}),
    "port": (("serve",), "the port to listen on; 0 takes a free port", {"type": int, "default": 8000}),
    "split": (("compare",), "one split (default: all that both runs have)", {}),
    "against": (("report",), "another run folder to compare with", {}),
    "cost": (("report",), "count parameters and multiply-adds (takes seconds)", {"action": "store_true"}),
    "sample": (("data",), "the number of images to inspect per split (default: all)", {"type": _count, "default": 0}),
    "audit": (("data",), "suggest corrections of the labels, as a page and a CSV", {"action": "store_true"}),
    "configs": (("summary",), "several configs, separated by commas", {"default": ""}),
    "topology": (("compile",), "a TPU slice such as v5e:16x16 (default: the devices of this host)", {"default": ""}),
    "find-batch": (("compile",), "find the largest batch per device that fits", {"action": "store_true"}),
    "labels": (("compile",), "the number of labels (default: as in the data set)", {"type": _count, "default": 0}),
    "quick": (("compile",), "use the lowest optimization level, in a fraction of the time", {"action": "store_true"}),
    "output": (tuple(OUTPUTS), "where to write", {}),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"{message}; see --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="mlmoe", allow_abbrev=False, add_help=False)
    parser.add_argument("--version", action="version", version=f"mlmoe_jax {__version__}")
    parser.add_argument("--mode", action="append", default=[])
    for name in ("config", "workdir"):
        parser.add_argument(f"--{name}", action="append", default=[])
    for name, (_, _, options) in FLAGS.items():
        parser.add_argument(f"--{name}", **options)
    parser.add_argument("--json", action="store_true")
    return parser


def named_mode(arguments: Sequence[str]) -> str | None:
    """Return the mode of a command, its first word or the value of --mode; None if it has none.

    Raises UserError for an unknown mode, and for several modes.
    """
    words = list(arguments[:1]) if arguments and not arguments[0].startswith("-") else []
    for at, word in enumerate(arguments):
        if word.startswith("--mode="):
            words.append(word.removeprefix("--mode="))
        elif word == "--mode":
            words += arguments[at + 1 : at + 2]
    if len(words) > 1:
        raise UserError(f"the mode is given {len(words)} times ({', '.join(words)}); give it once")
    if words and words[0] not in MODES:
        raise UserError(f"there is no mode '{words[0]}'{suggestion(words[0], MODES)} (see --help)")
    return words[0] if words else None


def _require_known(words: Sequence[str], mode: str) -> None:
    """Raise UserError if there are words that the parser does not know."""
    if not words:
        return
    flag = words[0].partition("=")[0]
    if not flag.startswith("-"):
        also = "; a mode is the first word, as in mlmoe predict" if flag in MODES else ""
        raise UserError(f"'{words[0]}' belongs to no flag{also}; see mlmoe {mode} --help")
    from mlmoe_jax.config.defaults import KEYS

    keys = [key for key in KEYS if key.rpartition(".")[2] == flag[2:]] or ([flag[2:]] if "." in flag else [])
    flags = [f"--{name}" for name in (*FLAGS, "config", "workdir", "mode", "json", "help", "version")]
    near = f"; did you mean '--config.{keys[0]}'?" if keys else nearest(flag, flags)
    raise UserError(f"there is no flag {flag}{near or f'; see mlmoe {mode} --help'}")


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
    mode, parser = named_mode(plain) or "train", _parser()
    flags, unknown = parser.parse_known_args(plain[1:] if plain[:1] == [mode] else plain)
    _require_known(unknown, mode)
    flags.mode = mode
    for name in ("config", "workdir"):
        values, twice = getattr(flags, name), (flags.mode, name) == ("compare", "workdir")
        if len(values) > 1 + twice:
            raise UserError(f"--{name} is given {len(values)} times; give it {'twice' if twice else 'once'}")
        if not twice:
            setattr(flags, name, values[0] if values else None)
        elif len(values) == 1:
            flags.workdir = None  # one folder instead of two counts as missing
    for name, (modes, _, _) in FLAGS.items():
        attribute = name.replace("-", "_")
        if flags.mode not in modes and getattr(flags, attribute) != parser.get_default(attribute):
            raise UserError(f"--{name} is for --mode={' and '.join(modes)}; leave it out of --mode={flags.mode}")
    _require_what_the_mode_takes(flags, overrides)
    if flags.init_from:
        overrides.append(("init_from", flags.init_from))
    return flags, overrides


def _require_what_the_mode_takes(flags: argparse.Namespace, overrides: list[tuple[str, str]]) -> None:
    mode, needs = flags.mode, NEEDS.get(flags.mode, {})
    swept = [axis.partition("=")[0].strip().removeprefix("config.") for axis in flags.sweep]
    if "config" in swept:  # a sweep over several configs has no default folder
        needs = {"workdir": "FOLDER"}
    if mode == "summary":
        if bool(flags.config) == bool(flags.configs):
            raise UserError("--mode=summary needs either --config=FILE or --configs=FILE,FILE,…")
    elif "config" not in needs and flags.config is not None:
        source = CONFIGS_FROM.get(mode, "the run folder")
        raise UserError(f"--mode={mode} takes its config from {source}; leave --config out")
    if flags.format and flags.format not in (known := TARGETS if mode == "export" else FORMATS):
        raise UserError(f"--format={flags.format} is not for --mode={mode}; there are {', '.join(known)}")
    if mode == "data" and flags.audit and flags.sample:
        raise UserError("--audit takes all images; leave --sample out")
    if mode == "data" and flags.output and not flags.audit:
        raise UserError("--mode=data writes files only with --audit; add it, or leave --output out")
    if mode in WITHOUT_FOLDER and flags.workdir is not None:
        raise UserError(f"--mode={mode} has no run folder; leave --workdir out")
    if mode in WITHOUT_KEYS and overrides:
        raise UserError(f"--mode={mode} takes no config keys; leave --config.{overrides[0][0]} out")
    if bool(flags.select) != bool(flags.count):
        raise UserError("--select and --count belong together, as in --select=both --count=100; give both or none")
    if missing := [f"--{name}={what}" for name, what in needs.items() if not getattr(flags, name)]:
        raise UserError(f"--mode={mode} needs {missing[0]}")
    if mode not in READING and any(map(is_shared, flags.workdir if mode == "compare" else (flags.workdir or "",))):
        raise UserError(
            f"--workdir={'… or '.join(ELSEWHERE)}… is for --mode={', '.join(READING)}; for {mode}, download a "
            "model with `hf download USER/NAME --local-dir=FOLDER` and set --workdir=FOLDER"
        )


def is_shared(location: str) -> bool:
    """Return whether a --workdir is a model that is only read: on the hub, or part of the package."""
    return location.startswith(ELSEWHERE)
