"""The reference of all config keys: the text of `--help=optim`, and the page docs/configuration.md.

`--help=config:vpt` lists the options of a config file in the same form.

`python -m tools.docs.write_configuration` writes the page.
"""

import textwrap
from collections.abc import Iterable, Iterator

from mlmoe_jax.config.defaults import why_unknown
from mlmoe_jax.config.loading import config_options
from mlmoe_jax.config.table import CONFIG, SECTIONS, key_named, section_named
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.keys import ChoiceKey, ConfigSection, Key, Others, TextKey, format_value

ROOT = "config"  # the name of the whole table
_WIDTH = 100

_INTRODUCTION = """\
# Configuration

`--config.optim.learning_rate=3e-4` sets a key on the command line, `config.optim.learning_rate = 3e-4` in a config
file. Values of a list are separated by commas, or written as a Python tuple.
`--help=optim` prints a section of this page, `--help=optim.learning_rate` a key, and `--help=config` the sections.
`--help=config:vpt` prints the options of a config file.

Each key has its default and unit, and in parentheses what it takes and the settings that it is for. Unless a limit is
given, integers are at most 1,000,000 and other numbers at most 1,000,000,000. Rules are ordered (regex, value) pairs
over [parameter paths](architecture.md#parameter-paths).
"""


def _list_key(name: str, key: Key) -> Iterator[str]:
    """Yield the lines of a nested Markdown list about a config key: one item for the key, and one per choice.

    Args:
      name: the name of the key as it is printed.
      key: the key.
    """
    default = key.format(key.default)
    choices = key.choices if isinstance(key, ChoiceKey) and isinstance(key.choices, dict) else {}
    written = f"`{name}={default}`" if default else f"`{name}`"
    if key.unit:
        written += f" {key.unit}"
    notes = [] if default else ["empty"]
    if not choices and key.allowed != TextKey.allowed:
        notes.append(key.allowed)
    notes += _list_conditions(name, key)
    if notes:
        written += f" ({'; '.join(notes)})"
    yield f"* {written}: {key.doc}".removesuffix(": ")
    for choice, meaning in choices.items():
        yield f"    * `{choice}`" if meaning == choice else f"    * `{choice}`: {meaning}"


def _list_keys(name: str, section: ConfigSection) -> Iterator[str]:
    """Yield the Markdown lines of the keys of a section, without the keys of its subsections.

    If the section accepts additional keys with any name, the last item is called NAME.

    Args:
      name: the dotted name of the section; "" for the whole config.
      section: the section.
    """
    prefix = f"{name}." if name else ""
    for last, entry in section.entries.items():
        if isinstance(entry, Key):
            yield from _list_key(f"{prefix}{last}", entry)
    if section.further is not None:
        yield from _list_key(f"{prefix}NAME", section.further)


def _list_conditions(name: str, entry: Key | ConfigSection) -> Iterator[str]:
    """Yield the conditions under which a key or section has an effect, without the conditions of its parent section.

    Args:
      name: the dotted name of the entry.
      entry: the entry.
    """
    place = name.rpartition(".")[0]
    inherited = section_named(place).only_if
    for key, values in entry.only_if.items():
        if inherited.get(key) == values:
            continue
        short = key.removeprefix(f"{place}.") if place else key
        if values == Others(("",)):
            yield f"if {short} is set"
        elif isinstance(values, Others):
            yield f"unless {short} is {_join(values.values)}"
        else:
            yield f"for {short}={_join(values)}"


def _join(values: Iterable) -> str:
    return ", ".join(map(format_value, values))


# ------------------------------------------------------------------------------------------------------------ the help
def describe_config(topic: str) -> str:
    """Return the help text of a section or a key of the config, or of a config file.

    Args:
      topic: a dotted name such as `optim` or `optim.learning_rate`, `config` for the whole config, or `config:FILE`.

    Raises:
      UserError: there is no such section, key or file. The message names the most similar one.
    """
    root, is_file, location = topic.partition(":")
    if is_file and root == ROOT:
        return _describe_file(location)
    name = "" if topic == ROOT else topic
    if section := section_named(name):
        return _describe_section(name, section)
    key = key_named(name)
    if key is None:
        raise UserError(f"config section or key '{topic}' {why_unknown(topic)}")
    return _plain(_list_key(topic, key))


def _sentence(name: str, section: ConfigSection) -> str:
    """Return the description of a section, with the conditions under which it has an effect in parentheses."""
    conditions = list(_list_conditions(name, section)) if name else []
    return f"{section.doc.removesuffix('.')} ({'; '.join(conditions)})." if conditions else section.doc


def _describe_section(name: str, section: ConfigSection) -> str:
    prefix = f"{name}." if name else ""
    inside = {last: entry for last, entry in section.entries.items() if isinstance(entry, ConfigSection)}
    listed = [f"* {prefix}{last}: {_sentence(f'{prefix}{last}', entry)}" for last, entry in inside.items()]
    parts = ([f"{name or ROOT}: {_sentence(name, section)}"], _list_keys(name, section), listed)
    return "\n\n".join(filter(None, map(_plain, parts)))


def _describe_file(location: str) -> str:
    doc, options = config_options(location)
    lines = [line for name, key in options.items() for line in _list_key(name, key)]
    return "\n\n".join(filter(None, (doc, _plain(lines) or "It declares no options.")))


def _plain(lines: Iterator[str] | list[str]) -> str:
    """Return the lines of a Markdown list as plain text for a terminal, without list marks and wrapped to _WIDTH."""
    wrapped = []
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()))
        text = line.strip().removeprefix("* ").replace("`", "")
        wrapped += textwrap.wrap(
            text,
            _WIDTH,
            initial_indent=indent,
            subsequent_indent=f"{indent}    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(wrapped)


# ------------------------------------------------------------------------------------------------------------ the page
def reference_page() -> str:
    """Return the text of docs/configuration.md."""
    lines = [_INTRODUCTION, *_list_keys("", CONFIG), ""]
    for name, section in SECTIONS.items():
        keys = list(_list_keys(name, section))
        lines += [f"## {name}", "", _sentence(name, section), "", *keys, *([""] if keys else [])]
    return "\n".join(lines)
