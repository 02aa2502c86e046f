"""The text of --help: all modes on one screen, or the flags of one mode with an example."""

from __future__ import annotations

import textwrap

from mlmoe_jax.apps.cli.flags import FLAGS, MODES, NEEDS, OUTPUTS, PURPOSES, READING, WITHOUT_FOLDER, WITHOUT_KEYS

_WIDTH = 100
# Mode -> the arguments of an example.
EXAMPLES = {
    "train": "--config=mlvpt_digits --workdir=runs/digits --config.optim.learning_rate=3e-4",
    "prune": "--config=e2vpt --workdir=runs/pruned",
    "reproduce": "--table=mlvpt.1 --dataset=digits --dry-run",
    "import": "--config=mlvpt_vit --init-from=checkpoint.pth --workdir=runs/published",
    "eval": "--workdir=runs/digits --config.data.test_splits=val",
    "thresholds": "--workdir=runs/digits --config.thresholds.per=global",
    "calibrate": "--workdir=runs/digits --config.calibration.method=isotonic",
    "report": "--workdir=runs/digits",
    "compare": "--workdir=runs/first --workdir=runs/second",
    "predict": "--workdir=runs/digits --images photos --output=labels.csv",
    "serve": "--workdir=runs/digits --port=8000",
    "export": "--workdir=runs/digits --format=onnx --output=exported",
    "push": "--workdir=runs/digits --repo=ada/digits --license=apache-2.0",
    "data": "--config=own_csv:root=photos",
    "pack": "--config=own_csv:root=photos --output=packed",
    "features": "--config=own_csv:root=photos --output=features",
    "summary": "--configs=mlvpt_digits,linear_probe",
    "compile": "--config=mlvpt_digits --topology=v5e:4x4",
}


def help_of(mode: str | None) -> str:
    """Return the help of a mode; of the whole program for None."""
    return _overview() if mode is None else _help_of_mode(mode)


def _overview() -> str:
    lines = ["mlmoe MODE --FLAG=VALUE … --config.KEY=VALUE …", "", "Multi-label image classification."]
    for purpose, modes in PURPOSES.items():
        lines += ["", f"{purpose}:", *(f"  {mode:<11} {sentence}" for mode, sentence in modes.items())]
    return "\n".join(
        [
            *lines,
            "",
            "mlmoe MODE --help   the flags of a mode, and an example",
            "--help=config       the sections of the config; --help=optim the keys of one",
            "--version           the version",
            "",
            "--mode=MODE is another form of MODE. Read on in docs/getting-started.md.",
        ]
    )


def _help_of_mode(mode: str) -> str:
    lines = [f"mlmoe {mode}: {MODES[mode]}", ""]
    for flag, text in _flags_of(mode).items():
        lines += textwrap.wrap(
            f"{flag:<18} {text}", _WIDTH, initial_indent="  ", subsequent_indent=" " * 21, break_on_hyphens=False
        )
    if mode not in WITHOUT_KEYS:
        lines += ["", "--config.KEY=VALUE sets a key of the config; --help=config lists them."]
    return "\n".join([*lines, "", "example:", f"  mlmoe {mode} {EXAMPLES[mode]}"])


def _flags_of(mode: str) -> dict[str, str]:
    """Return flag -> its sentence, with the required flags first."""
    flags, needs = {}, NEEDS.get(mode, {})
    if "config" in needs or mode == "summary":
        flags["config"] = "a config file or its name, with :key=value,…"
    if mode not in WITHOUT_FOLDER:
        flags["workdir"] = _folder(mode)
    texts = {name: text for name, (modes, text, _) in FLAGS.items() if mode in modes}
    flags |= texts | ({"output": OUTPUTS[mode]} if mode in OUTPUTS else {})
    flags["json"] = "print results as JSON with all digits"
    order = sorted(flags, key=lambda name: name not in needs)
    return {_written(name): f"{flags[name]}{' (needed)' if name in needs else ''}" for name in order}


def _folder(mode: str) -> str:
    if mode == "compare":
        return "the folder of a run; give it twice"
    if mode in READING:
        return "the folder of a run, hf:USER/NAME[@REVISION] or demo:photographs"
    return "the folder of the run" if "workdir" in NEEDS.get(mode, {}) else "the folder of the run (default: in runs/)"


def _written(name: str) -> str:
    switch = name == "json" or FLAGS.get(name, ((), "", {}))[2].get("action") == "store_true"
    return f"--{name}" if switch else f"--{name}=…"
