"""Overrides, stored configs and command lines."""

from pathlib import Path

from hypothesis import strategies as st

import mlmoe_jax.config as configuration
from mlmoe_jax.apps.cli.commands import COMMANDS
from mlmoe_jax.apps.cli.flags import FLAGS, parse_flags
from mlmoe_jax.config.table import KEYS
from tools.fuzz.hostile import TEXTS, Case, damaged_json

WORDS = (
    "nan",
    "inf",
    "-1",
    "1e400",
    "9" * 5000,
    "(1,)",
    "(" * 300,
    "('a',",
    "{}",
    "None",
    "true",
    "",
    "\0",
    "é",
    "0x10",
    "1_0",
)


def overrides(draw: st.DrawFn, base: Path, place: Path) -> Case:
    keys = st.one_of(
        st.sampled_from(sorted(KEYS)), st.sampled_from(("model", "no.key", "", "train.", "..", "data.root.x"))
    )
    pairs = draw(
        st.lists(st.tuples(keys, st.one_of(st.sampled_from(WORDS), st.text(max_size=10))), min_size=1, max_size=3)
    )
    name = draw(
        st.sampled_from(("mlvpt_digits", "dr_moe", "e2vpt", "mlvpt_digits:a=1", "no", "x" * 4000, "\0", "/", ""))
    )
    name = "mlvpt_digits" if draw(st.integers(0, 4)) else name

    def act() -> None:
        configuration.validate(configuration.load_config(name, pairs))

    return f"{name[:40]} {pairs}"[:300], act


def stored_config(draw: st.DrawFn, base: Path, place: Path) -> Case:
    text = damaged_json(draw, configuration.to_json(configuration.default_config()).encode())

    def act() -> None:
        configuration.validate(configuration.from_json(text.decode(errors="surrogateescape")))

    return repr(text[:100]), act


def command_line(draw: st.DrawFn, base: Path, place: Path) -> Case:
    modes = st.sampled_from((*COMMANDS, "none", ""))
    words = st.one_of(
        st.builds("--mode={}".format, modes),
        st.builds("--{}={}".format, st.sampled_from((*FLAGS, "config", "workdir", "json", "help")), TEXTS),
        st.builds("--config.{}={}".format, st.sampled_from(sorted(KEYS)), TEXTS),
        st.builds("--help={}".format, st.one_of(st.sampled_from(sorted(KEYS)), TEXTS)),
        TEXTS,
    )
    arguments = [word for word in draw(st.lists(words, max_size=5)) if word not in ("-h", "--help")]

    def act() -> None:
        parse_flags(arguments)

    return str(arguments)[:300], act
