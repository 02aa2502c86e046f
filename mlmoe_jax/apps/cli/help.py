"""The text of --help: all commands on one screen, or the flags of one command with an example."""

from __future__ import annotations

import textwrap

from mlmoe_jax.apps.cli.commands import COMMANDS, Command
from mlmoe_jax.apps.cli.flags import FLAGS, SWITCH

_WIDTH = 100
_END = """\

mlmoe MODE --help   the flags of a mode, and an example
--help=config       the sections of the config; --help=optim the keys of one
--version           the version

--mode=MODE is another form of MODE. Read on in docs/getting-started.md."""


def help_text(mode: str | None) -> str:
    """Return the help of a mode, or for None of the whole program."""
    return _overview() if mode is None else _mode_help(mode, COMMANDS[mode])


def _overview() -> str:
    lines = ["mlmoe MODE --FLAG=VALUE … --config.KEY=VALUE …", "", "Multi-label image classification."]
    for purpose in dict.fromkeys(command.purpose for command in COMMANDS.values()):
        lines += ["", f"{purpose}:"]
        lines += [f"  {mode:<11} {one.sentence}" for mode, one in COMMANDS.items() if one.purpose == purpose]
    return "\n".join([*lines, _END])


def _mode_help(mode: str, command: Command) -> str:
    lines = [f"mlmoe {mode}: {command.sentence}", ""]
    texts = _flag_texts(command)
    for name in sorted(texts, key=lambda name: name not in command.needs):  # required flags first
        flag = f"--{name}" if name == "json" or (name in FLAGS and FLAGS[name].options is SWITCH) else f"--{name}=…"
        line = f"{flag:<18} {texts[name]}{' (needed)' if name in command.needs else ''}"
        lines += textwrap.wrap(line, _WIDTH, initial_indent="  ", subsequent_indent=" " * 21, break_on_hyphens=False)
    if command.takes_keys:
        lines += ["", "--config.KEY=VALUE sets a key of the config; --help=config lists them."]
    return "\n".join([*lines, "", "example:", f"  mlmoe {mode} {command.example}"])


def _flag_texts(command: Command) -> dict[str, str]:
    """Return the help text of each flag of a command."""
    texts = {}
    if not command.config_from:
        texts["config"] = "a config file or its name, with :key=value,…"
    if command.folders:
        texts["workdir"] = _folder_text(command)
    texts |= {name: flag.help for name, flag in FLAGS.items() if name in command.flags}
    if command.output:
        texts["output"] = command.output
    return texts | {"json": "print results as JSON with all digits"}


def _folder_text(command: Command) -> str:
    if command.folders == 2:
        return "the folder of a run; give it twice"
    if command.reads_shared:
        return "the folder of a run, hf:USER/NAME[@REVISION] or demo:photographs"
    return "the folder of the run" if "workdir" in command.needs else "the folder of the run (default: in runs/)"
