"""The reference of all config keys: the text of `--help=optim`, and the page docs/configuration.md.

`python -m mlmoe_jax.apps.cli.reference > docs/configuration.md` writes the page.
"""

import textwrap
from collections.abc import Mapping

from mlmoe_jax.config.defaults import CONFIG, PLACE, SECTIONS, adapter_section, key_named, why_unknown
from mlmoe_jax.config.keys import ANY, Choice, Flag, Key, Number, Rules, Section, Text, Texts
from mlmoe_jax.errors import UserError
from mlmoe_jax.models.registries import ADAPTERS

ROOT = "config"  # the name of the whole table
_WIDTH = 100

_INTRODUCTION = """\
# Configuration

`--config.optim.learning_rate=3e-4` sets a key on the command line, `config.optim.learning_rate = 3e-4` in a config
file. Values of a list are separated by commas, or written as a Python tuple.
`--help=optim` prints a section of this page, `--help=optim.learning_rate` a key, and `--help=config` the sections.

Each key has its default and unit, and in parentheses the limits of a number or the choices of a name. Otherwise,
numbers are at least 0 or above 0; integers are at most 1,000,000 and other numbers at most 1,000,000,000. Rules are
ordered (regex, value) pairs over [parameter paths](architecture.md#parameter-paths).
"""


def describe(topic: str) -> str:
    """Return the help text of a dotted section or key, or of `config`, the whole table.

    Raises UserError, with the nearest key, for an unknown section or key.
    """
    name = topic.removeprefix(f"{ROOT}.")
    if name == ROOT:
        return _describe_section("", CONFIG)
    if name in SECTIONS:
        return _describe_section(name, SECTIONS[name])
    if name.removeprefix(f"{PLACE}.") in ADAPTERS:
        return _describe_section(name, adapter_section(name.removeprefix(f"{PLACE}.")))
    key = key_named(name)
    if key is None:
        raise UserError(f"config section or key '{name}' {why_unknown(name)}")
    return "\n".join(_describe_key(name, key))


def _describe_section(name: str, section: Section) -> str:
    lines = [*_wrapped(f"{name or ROOT}: {section.doc}", ""), ""]
    prefix = f"{name}." if name else ""
    for entry, key in _keys(section).items():
        lines += [*_describe_key(f"{prefix}{entry}", key), ""]
    below = {entry: one for entry, one in section.entries.items() if isinstance(one, Section)}
    if below:
        lines.append("sections, each with its own --help=SECTION:")
    for entry, one in below.items():
        lines += _wrapped(f"{prefix}{entry}: {one.doc}", "  ", below="    ")
    return "\n".join(lines).rstrip()


def _describe_key(name: str, key: Key) -> list[str]:
    lines = _wrapped(f"{name}: {_takes(key)}; default {key.text_of(key.default) or 'empty'}", "", below="    ")
    lines += _wrapped(key.doc, "    ")
    for choice, meaning in _meanings(key).items():
        lines += _wrapped(f"{choice}: {meaning}", "      ", below="        ")
    return lines


def _wrapped(text: str, indent: str, *, below: str = "") -> list[str]:
    how = {"initial_indent": indent, "subsequent_indent": below or indent}
    return textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False, **how)


def _keys(section: Section) -> dict[str, Key]:
    """Return the keys directly in a section; NAME stands for keys that may be added."""
    keys = {name: one for name, one in section.entries.items() if isinstance(one, Key)}
    return keys if section.further is None else {**keys, "NAME": section.further}


def _takes(key: Key) -> str:
    return f"{key.takes} ({key.unit})" if key.unit else key.takes


def _meanings(key: Key) -> Mapping[str, str]:
    return key.of if isinstance(key, Choice) and isinstance(key.of, Mapping) else {}


# ------------------------------------------------------------------------------------------------------------ the page
def page() -> str:
    """Return docs/configuration.md."""
    parts = [_INTRODUCTION, *_items("", CONFIG)]
    for name, section in SECTIONS.items():
        parts += [f"## {name}\n\n{section.doc}\n", *_items(f"{name}.", section)]
        for adapter in ADAPTERS if name == PLACE else ():
            keys = adapter_section(adapter)
            parts += [f"## {name}.{adapter}\n\n{keys.doc}\n", *_items(f"{name}.{adapter}.", keys)]
    return "\n".join(parts)


def _items(prefix: str, section: Section) -> list[str]:
    """Return the lines of a list of the keys in a section, each with its choices as a list below it."""
    lines = []
    for name, key in _keys(section).items():
        lines.append(f"* `{prefix}{name}{_default(key)}: {key.doc}")
        meanings = _meanings(key).items()
        lines += [f"    * `{choice}`" + (f": {text}" if text != choice else "") for choice, text in meanings]
    return [*lines, ""] if lines else []


def _default(key: Key) -> str:
    """Return the default with its unit, and what the key takes, as it follows the name."""
    limits, text = _limits(key), key.text_of(key.default)
    if not text:
        return f"` (empty; {limits})" if limits else "` (empty)"
    return f"={text}`" + (f" {key.unit}" if key.unit else "") + (f" ({limits})" if limits else "")


def _limits(key: Key) -> str:
    """Return what a key takes in a few words, empty if the default or the meanings of the choices show it."""
    if isinstance(key, Number):
        return _interval(key)
    return "" if _meanings(key) or isinstance(key, Flag | Texts | Rules) or type(key) is Text else key.takes


def _interval(key: Number) -> str:
    """Return the limits of a number, except that it is at least 0 or above 0."""
    if key.least == ANY:
        return "any"
    lower = key.least if key.above is None else key.above
    upper = f"< {key.below:g}" if key.most is None and key.below is not None else ""
    upper = upper if key.most is None else f"≤ {key.most:,}"
    return ", ".join(filter(None, [f"≥ {lower:g}" if lower else "", upper]))


if __name__ == "__main__":
    print(page(), end="")
