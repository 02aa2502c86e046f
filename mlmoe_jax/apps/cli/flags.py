"""The flags of the command line: their help, and how a command is parsed."""

import argparse
import functools
import os
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NoReturn

from mlmoe_jax.apps.cli.commands import COMMANDS
from mlmoe_jax.apps.export.targets import TEMPLATES
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.keys import KeyValues
from mlmoe_jax.runtime.registry import nearest
from mlmoe_jax.runtime.version import __version__

DEFAULT_MODE = "train"
_END = """\
mlmoe MODE --help   the flags of a mode, and an example
--help=config       the sections of the config; --help=optim the keys of one
--help=config:vpt   the options of a config file
--version           the version

--mode=MODE is another form of MODE, and --config.KEY=VALUE sets a key of the config. Read on in
docs/getting-started.md."""


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return int(text)


def _integers(text: str) -> list[int]:
    if not all(part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of integers, such as 0,1,2")
    return list(dict.fromkeys(map(int, text.split(","))))


def _seconds(text: str) -> Fraction:
    if not re.fullmatch(r"\d*\.?\d+", text) or not Fraction(text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds above 0, such as 5 or 0.5")
    return Fraction(text)


def _worker(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 1 to N, and N, as in 2/16")
    return int(number) - 1, int(count)


SWITCH = {"action": "store_true"}
COUNT = {"type": _count}
# The arguments of `ArgumentParser.add_argument`. `Command.needs` and `Command.flags` say which command has which flag.
FLAGS: dict[str, dict[str, Any]] = {
    "config": {"help": "a config file or its name, with :key=value,…"},
    "workdir": {
        "help": "the folder of the run (default for a new run: in runs/); in predict, serve and export also "
        "hf:USER/NAME[@REVISION] or demo:photographs"
    },
    "verbose": SWITCH | {"help": "print all metrics, not only the main ones"},
    "sweep": {
        "help": "config.KEY=VALUE,VALUE,…, or config=NAME,NAME,… for several configs; repeat for a grid",
        "action": "append",
        "default": [],
    },
    "profile": {"help": "START:STOP, the first and the last step to trace into the run folder"},
    "table": {"help": "the table or figure of a paper, such as mlvpt.1 or mlvpt.fig3"},
    "only": {"help": "the rows with these settings, separated by commas: ML-VPT,dinov2", "default": ""},
    "dataset": {"help": "another data set for all rows, such as digits", "default": ""},
    "root": {"help": "the folder of the data set, or DATASET=FOLDER,DATASET=FOLDER", "default": ""},
    "seeds": {"help": "seeds to repeat every run with, such as 0,1,2", "type": _integers, "default": ()},
    "dry-run": SWITCH | {"help": "print the commands of all runs, and train nothing"},
    "images": {
        "help": "image files, folders, videos, Parquet files, quoted patterns such as 'photos/**/*.jpg', @FILE with "
        "one path per line, - for paths on stdin, several in a row or each with --images; in export, images for "
        "--format=onnx_int8 in place of training images",
        "action": "extend",
        "nargs": "+",
        "default": [],
    },
    "format": {
        "help": "for export: stablehlo or onnx (a folder with a program and its labels), onnx_float16 or onnx_int8 (a "
        "smaller program), safetensors (a file with our parameter paths), peft (a folder that PEFT loads onto a model "
        "of transformers), or official (a .safetensors or .npz file with the names of the authors' code; default for "
        "such an --output); for predict and pack: label_studio or fiftyone (.json), cvat (.xml), sidecar (a folder "
        "with a text file of tags per image), wd_tagger (such a folder with selected_tags.csv), xmp (keywords in "
        "sidecars such as 1.jpg.xmp, in a folder, or beside images in the folder), or xmp_lightroom (such as 1.xmp); "
        "for predict also parquet (default), csv or jsonl, the format of the parts in a folder"
    },
    "include-frozen": {
        "help": "of --format=safetensors: always (all frozen weights; default), auto (unpublished frozen weights), or "
        "never",
        "choices": ("always", "auto", "never"),
        "default": "always",
    },
    "calibration-images": COUNT
    | {"help": "the number of images for --format=onnx_int8 (default: 250); a fifth of them is only compared"},
    "merge": SWITCH | {"help": "make adapters part of the weights of the backbone"},
    "template": {
        "help": "files to add to the folder of a program: mlflow (MLflow loads it), space (a Space of the Hugging Face "
        "hub)",
        "choices": tuple(TEMPLATES),
    },
    "outputs": {
        "help": "what a program returns: probability (default), and after commas features (a vector per image) and map "
        "(where each label is)",
        "default": "probability",
    },
    "names": {
        "help": "a list of label names, one per line, each with descriptions after tabs or without; in predict also "
        "the .safetensors file of mlmoe encode, in place of --workdir"
    },
    "backbone": {"help": "the backbone whose text tower encodes the names, such as siglip2_vitb16_256 or clip_vitb16"},
    "init-from": {
        "help": "short for --config.init_from: another run folder, a model on the hub such as hf:user/name, a folder "
        "of PEFT, or a checkpoint of the authors' code"
    },
    "repo": {"help": "USER/NAME, the name that the model gets on the hub"},
    "revision": {"help": "a branch to push to (default: main)"},
    "private": SWITCH | {"help": "show the model to its owner only"},
    "license": {"help": "the license of the trained values for the model card, such as apache-2.0", "default": ""},
    "checkpoint": {
        "help": "best (the selected weights; default), latest (the weights at the end of the newest checkpoint, "
        "averaged), raw (these, not averaged), or the step of a checkpoint",
        "default": "best",
    },
    "top-k": COUNT | {"help": "the number of labels per image, instead of thresholds"},
    "gates": SWITCH | {"help": "write the values of the gates too, as JSON lines"},
    "select": {
        "help": "choose --count of the images without labels to label next, from the uncertainty of their scores "
        "(uncertain), the distances of their features (diverse), or both",
        "choices": ("uncertain", "diverse", "both"),
    },
    "count": COUNT | {"help": "the number of images that --select chooses"},
    "part-size": COUNT | {"help": "the number of images in each part of a folder (default: 4096)"},
    "worker": {
        "help": "K/N: this is worker K of N that run the same command to label a folder of parts (default: as the "
        "launcher says)",
        "type": _worker,
    },
    "column": {"help": "the column of images in Parquet files (default: found by its type and name)", "default": ""},
    "every": {
        "help": "the seconds between frames of videos, such as 5 or 0.5 (default: all, and no videos in folders)",
        "type": _seconds,
    },
    "per-video": SWITCH | {"help": "write one row per video, with the highest score of each label and its time"},
    "rename": {
        "help": "a file with a label and its name in the output per line, with a tab or a comma between; * ? [abc] in "
        "a label stand for several, and labels with the same new name become one, with the highest score and the "
        "lowest threshold",
        "default": "",
    },
    "leave-out": {
        "help": "a file with a label per line to leave out of the output, by its old or new name; may have * ? [abc]",
        "default": "",
    },
    "batch-size": COUNT | {"help": "the number of images per batch"},
    "host": {"help": "the address to listen on", "default": "127.0.0.1"},
    "port": {"help": "the port to listen on; 0 takes a free port", "type": int, "default": 8000},
    "split": {"help": "the split (default: the first test split that both runs have)"},
    "against": {"help": "another run folder to compare with"},
    "cost": SWITCH | {"help": "count parameters and multiply-adds (takes seconds)"},
    "sample": COUNT | {"help": "the number of images to inspect per split (default: all)", "default": 0},
    "audit": SWITCH | {"help": "suggest corrections of the labels of all images, as a page and a CSV in --output"},
    "configs": {"help": "several configs, separated by commas", "default": ""},
    "topology": {"help": "a TPU slice such as v5e:16x16 (default: the devices of this host)"},
    "find-batch": SWITCH | {"help": "find the largest batch per device that fits"},
    "labels": COUNT | {"help": "the number of labels (default: as in the data set)", "default": 0},
    "quick": SWITCH | {"help": "use the lowest optimization level, in a fraction of the time"},
    "output": {},  # `Command.output` is its help
    "json": SWITCH | {"help": "print results as JSON with all digits"},
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


@functools.cache
def _parser() -> argparse.ArgumentParser:
    """Return the argument parser, with a subparser for each command."""
    style = {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = _Parser(prog="mlmoe", description="Multi-label image classification.", epilog=_END, **style)
    parser.add_argument("--version", action="version", version=f"mlmoe_jax {__version__}")
    modes = parser.add_subparsers(dest="mode", metavar="MODE", required=True)
    for mode, command in COMMANDS.items():
        example = f"example:\n  mlmoe {mode} {command.example}"
        own = modes.add_parser(mode, help=command.sentence, description=command.sentence, epilog=example, **style)
        for name in (*command.needs, *command.flags, "json"):
            options = {"help": command.output} | FLAGS[name] | command.options.get(name, {})
            own.add_argument(f"--{name}", required=name in command.needs, **options)
    return parser


def parse_flags(arguments: Sequence[str]) -> tuple[argparse.Namespace, KeyValues]:
    """Parse the arguments of the command line.

    Returns:
      The flags, and the config overrides as pairs ("section.key", "text").

    Raises:
      UserError: a flag is unknown, missing or repeated, or its value is wrong.
      SystemExit: the arguments ask for the help or the version, which was printed.
    """
    words = _put_mode_first(arguments)
    plain, overrides = words, ()
    if words[0] not in COMMANDS or COMMANDS[words[0]].stages:
        plain, overrides = _split_overrides(words)
    _require_once(words)
    _require_known(plain)
    flags = _parser().parse_args(plain)
    _require_other_output(vars(flags))
    if source := vars(flags).get("init_from"):
        overrides = [*overrides, ("init_from", source)]
    return flags, overrides


def _require_other_output(flags: Mapping[str, Any]) -> None:
    """Raise UserError if --output is a file that another flag names, which would be replaced."""
    output = flags.get("output") or ""
    for name, value in flags.items() if os.path.isfile(output) else ():
        for word in value if isinstance(value, list) else [value]:
            path = f"{word}".removeprefix("@")
            if name != "output" and os.path.isfile(path) and os.path.samefile(path, output):
                raise UserError(f"--output={output} would replace the file of --{name}; name another file")


def _require_once(words: Sequence[str]) -> None:
    """Raise UserError if a flag or config key that may not be repeated is given more than once.

    Otherwise, the last value would silently replace the first.
    """
    command = COMMANDS.get(words[0])
    names = [word.partition("=")[0] for word in words if word.startswith("--")]
    for name in dict.fromkeys(names):
        flag = name.removeprefix("--")
        options = FLAGS.get(flag, {}) | (command.options.get(flag, {}) if command else {})
        if names.count(name) > 1 and options.get("action") not in ("append", "extend"):
            raise UserError(f"{name} is given {names.count(name)} times; give it once")


def _require_known(words: Sequence[str]) -> None:
    """Raise UserError if the command does not have a flag.

    Without this check, argparse would report a misspelled required flag as missing.
    """
    if words[0] not in COMMANDS:
        return
    command = COMMANDS[words[0]]
    known = (*command.needs, *command.flags, "json", "help")
    for word in words:
        name = word.partition("=")[0].removeprefix("--")
        if word.startswith("--") and name and name not in known:
            hint = nearest(name, known).removesuffix("?")
            raise UserError(f"unrecognized arguments: {word}{hint}; see mlmoe {words[0]} --help")


def _put_mode_first(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the mode as the first word.

    `--mode=MODE` is moved to the front as MODE. If no mode is given, DEFAULT_MODE is inserted.
    """
    modes = [word.removeprefix("--mode=") for word in arguments if word.startswith("--mode=")]
    others = [word for word in arguments if not word.startswith("--mode=")]
    if not modes and (not others or (others[0].startswith("-") and others[0] not in ("-h", "--help", "--version"))):
        modes = [DEFAULT_MODE]
    return [*modes, *others]


def _split_overrides(words: Sequence[str]) -> tuple[list[str], KeyValues]:
    """Return the arguments other than `--config.KEY=VALUE`, and the pairs (KEY, VALUE) of the config overrides."""
    plain, overrides = [], []
    for word in words:
        key, equals, value = word.partition("=")
        if not key.startswith("--config."):
            plain.append(word)
        elif equals:
            overrides.append((key.removeprefix("--config."), value))
        else:
            raise UserError(f"{word} has no value; write {word}=VALUE")
    return plain, overrides
