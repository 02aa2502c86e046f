"""The flags of the command line besides `--config.KEY=VALUE`: their help, their parsing and their checks."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlmoe_jax.apps.cli.commands import COMMANDS, SHARED, Command, KeyValues, is_shared, sweeps_configs
from mlmoe_jax.apps.export.targets import TEMPLATES
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.registry import nearest, suggestion
from mlmoe_jax.runtime.version import __version__

DEFAULT_MODE = "train"


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return int(text)


@dataclass(frozen=True)
class Option:
    """A flag: its help text, and its options for `ArgumentParser.add_argument`."""

    help: str
    options: dict[str, Any] = field(default_factory=dict)


SWITCH = {"action": "store_true"}
# Flags of some commands only, in the order of the help. `Command.flags` says whose they are.
FLAGS: dict[str, Option] = {
    "verbose": Option("print all metrics, not only the main ones", SWITCH),
    "sweep": Option(
        "config.KEY=VALUE,VALUE,…, or config=NAME,NAME,… for several configs; repeat for a grid",
        {"action": "append", "default": []},
    ),
    "profile": Option(
        "START:STOP, the first and the last step to trace into the run folder",
        {"default": ""},
    ),
    "table": Option("the table or figure of a paper, such as mlvpt.1 or mlvpt.fig3", {"default": ""}),
    "only": Option("the rows with these settings, separated by commas: ML-VPT,dinov2*", {"default": ""}),
    "dataset": Option("another data set for all rows, such as digits", {"default": ""}),
    "root": Option("the folder of the data set, or DATASET=FOLDER,DATASET=FOLDER", {"default": ""}),
    "seeds": Option("seeds to repeat every run with, such as 0,1,2", {"default": ""}),
    "dry-run": Option("print the commands of all runs, and train nothing", SWITCH),
    "images": Option(
        "image files, folders, quoted patterns such as 'photos/**/*.jpg', @FILE with one path per line, - for paths on "
        "stdin; in export, images for --format=onnx_int8 in place of training images",
        {"nargs": "+", "default": []},
    ),
    "format": Option(
        "for export: stablehlo or onnx (a folder with a program and its labels), onnx_float16 or onnx_int8 (a smaller "
        "program), safetensors (a file with our parameter paths), peft (a folder that PEFT loads onto a model of "
        "transformers), or official (a .safetensors or .npz file with the names of the authors' code; default for such "
        "an --output); for predict and pack: label_studio or fiftyone (.json), cvat (.xml), sidecar (a folder with a "
        "text file of tags per image), or wd_tagger (such a folder with selected_tags.csv)",
    ),
    "include-frozen": Option(
        "of --format=safetensors: always (all frozen weights; default), auto (unpublished frozen weights), never",
        {"choices": ("always", "auto", "never"), "default": "always"},
    ),
    "calibration-images": Option(
        "the number of images for --format=onnx_int8 (default: 250); a fifth of them is only compared", {"type": _count}
    ),
    "merge": Option("make adapters part of the weights of the backbone", SWITCH),
    "template": Option(
        "files to add to the folder of a program: mlflow (MLflow loads it), space (a Space of the Hugging Face hub)",
        {"choices": tuple(TEMPLATES)},
    ),
    "init-from": Option(
        "short for --config.init_from: another run folder, a model on the hub such as hf:user/name, a folder of PEFT, "
        "or a checkpoint of the authors' code",
        {"default": ""},
    ),
    "repo": Option("the name of the model on the hub, USER/NAME", {"default": ""}),
    "revision": Option("a branch to push to (default: main)", {"default": ""}),
    "private": Option("show the model to its owner only", SWITCH),
    "license": Option("the license of the trained values for the model card, such as apache-2.0", {"default": ""}),
    "checkpoint": Option(
        "best (the selected weights; default), latest (the weights at the end of the newest checkpoint), or the step "
        "of a checkpoint",
        {"default": "best"},
    ),
    "top-k": Option("the number of labels per image, instead of thresholds", {"type": _count}),
    "gates": Option("write the values of the gates too, as JSON lines", SWITCH),
    "select": Option(
        "choose --count of the images without labels to label next, from the uncertainty of their scores (uncertain), "
        "the distances of their features (diverse), or both",
        {"choices": ("uncertain", "diverse", "both")},
    ),
    "count": Option("the number of images that --select chooses", {"type": _count}),
    "batch-size": Option("the number of images per batch", {"type": _count}),
    "host": Option("the address to listen on", {"default": "127.0.0.1"}),
    "port": Option("the port to listen on; 0 takes a free port", {"type": int, "default": 8000}),
    "split": Option("one split (default: all that both runs have)"),
    "against": Option("another run folder to compare with"),
    "cost": Option("count parameters and multiply-adds (takes seconds)", SWITCH),
    "sample": Option("the number of images to inspect per split (default: all)", {"type": _count, "default": 0}),
    "audit": Option("suggest corrections of the labels, as a page and a CSV", SWITCH),
    "configs": Option("several configs, separated by commas", {"default": ""}),
    "topology": Option("a TPU slice such as v5e:16x16 (default: the devices of this host)", {"default": ""}),
    "find-batch": Option("find the largest batch per device that fits", SWITCH),
    "labels": Option("the number of labels (default: as in the data set)", {"type": _count, "default": 0}),
    "quick": Option("use the lowest optimization level, in a fraction of the time", SWITCH),
    "output": Option("where to write"),  # `Command.output` says what
}


# ------------------------------------------------------------------------------------------------------------- parsing
class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"{message}; see --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="mlmoe", allow_abbrev=False, add_help=False)
    parser.add_argument("--version", action="version", version=f"mlmoe_jax {__version__}")
    for name in ("mode", "config", "workdir"):
        parser.add_argument(f"--{name}", action="append", default=[])
    for name, flag in FLAGS.items():
        parser.add_argument(f"--{name}", **flag.options)
    parser.add_argument("--json", action="store_true")
    return parser


def named_mode(arguments: Sequence[str]) -> str | None:
    """Return the mode that a command names by its first word or by --mode, or None.

    Raises UserError for an unknown mode, and for several modes.
    """
    words = [word.removeprefix("--mode=") for word in arguments if word.startswith("--mode=")]
    words += [value for word, value in itertools.pairwise(arguments) if word == "--mode"]
    if arguments and not arguments[0].startswith("-"):
        words.insert(0, arguments[0])
    if len(words) > 1:
        raise UserError(f"the mode is given {len(words)} times ({', '.join(words)}); give it once")
    if words and words[0] not in COMMANDS:
        raise UserError(f"there is no mode '{words[0]}'{suggestion(words[0], COMMANDS)} (see --help)")
    return words[0] if words else None


def parse_flags(arguments: Sequence[str]) -> tuple[argparse.Namespace, KeyValues]:
    """Return the flags and the overrides ("section.key", "text") of a command.

    Raises UserError for unknown, missing, repeated and misplaced flags.
    """
    plain, overrides = _split_overrides(arguments)
    mode, parser = named_mode(plain) or DEFAULT_MODE, _parser()
    flags, unknown = parser.parse_known_args(plain[1:] if plain[:1] == [mode] else plain)
    _require_known(unknown, mode)
    flags.mode = mode
    command = COMMANDS[mode]
    flags.config = _single("config", flags.config)
    if command.folders < 2:
        flags.workdir = _single("workdir", flags.workdir)
    _require_own_flags(flags, command, parser)
    _require_folder(flags, command)
    if overrides and not command.takes_keys:
        raise UserError(f"--mode={mode} takes no config keys; leave --config.{overrides[0][0]} out")
    _require_needed(flags, command)
    if command.check is not None:
        command.check(flags)
    if flags.init_from:
        overrides.append(("init_from", flags.init_from))
    return flags, overrides


def _split_overrides(arguments: Sequence[str]) -> tuple[list[str], KeyValues]:
    """Split arguments into the plain ones and the (key, value) pairs of `--config.KEY=VALUE`."""
    plain, overrides, waiting = [], [], list(arguments)
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("--config."):
            plain.append(word)
            continue
        key, equals, value = word.removeprefix("--config.").partition("=")
        if not equals:
            if not waiting or waiting[0].startswith("--"):
                raise UserError(f"{word} has no value; write {word}=VALUE")
            value = waiting.pop(0)
        overrides.append((key, value))
    return plain, overrides


# -------------------------------------------------------------------------------------------------------------- checks
def _require_known(words: Sequence[str], mode: str) -> None:
    """Raise UserError for the first of the words that the parser did not know."""
    if not words:
        return
    flag = words[0].partition("=")[0]
    if not flag.startswith("-"):
        also = "; a mode is the first word, as in mlmoe predict" if flag in COMMANDS else ""
        raise UserError(f"'{words[0]}' belongs to no flag{also}; see mlmoe {mode} --help")
    from mlmoe_jax.config.defaults import KEYS

    keys = [key for key in KEYS if key.rpartition(".")[2] == flag[2:]]
    if "." in flag:
        keys.append(flag[2:])
    if keys:
        raise UserError(f"there is no flag {flag}; did you mean '--config.{keys[0]}'?")
    known = [f"--{name}" for name in (*FLAGS, "config", "workdir", "mode", "json", "help", "version")]
    raise UserError(f"there is no flag {flag}{nearest(flag, known) or f'; see mlmoe {mode} --help'}")


def _single(name: str, values: Sequence[str]) -> str | None:
    if len(values) > 1:
        raise UserError(f"--{name} is given {len(values)} times; give it once")
    return values[0] if values else None


def _require_own_flags(flags: argparse.Namespace, command: Command, parser: argparse.ArgumentParser) -> None:
    """Raise UserError for a flag that only other commands have."""
    for name in (name for name in FLAGS if name not in command.flags):
        attribute = name.replace("-", "_")
        if getattr(flags, attribute) != parser.get_default(attribute):
            modes = " and ".join(mode for mode, other in COMMANDS.items() if name in other.flags)
            raise UserError(f"--{name} is for --mode={modes}; leave it out of --mode={flags.mode}")
    source = "--sweep" if sweeps_configs(flags) else command.config_from
    if flags.config is not None and source:
        raise UserError(f"--mode={flags.mode} takes its config from {source}; leave --config out")


def _require_folder(flags: argparse.Namespace, command: Command) -> None:
    """Raise UserError if a --workdir is too much for the command, or is a read-only model that it would change."""
    folders = flags.workdir if command.folders == 2 else [flags.workdir] if flags.workdir else []
    if folders and command.folders == 0:
        raise UserError(f"--mode={flags.mode} has no run folder; leave --workdir out")
    if len(folders) > command.folders:
        raise UserError(f"--workdir is given {len(folders)} times; give it twice")
    if any(map(is_shared, folders)) and not command.reads_shared:
        modes = ", ".join(mode for mode, other in COMMANDS.items() if other.reads_shared)
        raise UserError(
            f"--workdir={'… or '.join(SHARED)}… is for --mode={modes}; for {flags.mode}, download a "
            "model with `hf download USER/NAME --local-dir=FOLDER` and set --workdir=FOLDER"
        )


def _require_needed(flags: argparse.Namespace, command: Command) -> None:
    """Raise UserError if a required flag is missing. A sweep over configs requires --workdir instead."""
    needs = {"workdir": "FOLDER"} if sweeps_configs(flags) else command.needs
    for name, value in needs.items():
        given = getattr(flags, name)
        if not given or (name == "workdir" and command.folders == 2 and len(given) < 2):
            raise UserError(f"--mode={flags.mode} needs --{name}={value}")
