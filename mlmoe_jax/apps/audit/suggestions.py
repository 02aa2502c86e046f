"""`mlmoe data --audit`: write the suggested corrections of labels as a page with images and as a CSV."""

import contextlib
import itertools
import logging
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from mlmoe_jax.apps.audit.audit import Audit, audit_split, probe_config
from mlmoe_jax.apps.audit.audit_page import audit_page
from mlmoe_jax.data.sources.corrections import COLUMNS, Suggestion, read_suggestions
from mlmoe_jax.data.sources.named_files import resolve_path
from mlmoe_jax.data.sources.open import open_split
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.storage import Folder
from mlmoe_jax.runtime.table import Outcome, Table
from mlmoe_jax.runtime.text import quantity

_logger = logging.getLogger(__name__)

AUDIT_FOLDER, SUGGESTIONS, PAGE = "audit", "suggestions.csv", "audit.html"
# Files that LibreOffice, Microsoft Office, Vim and Emacs put beside a file that they have open.
_EDITOR_FILES = (".~lock.{}#", "~${}", ".{}.swp", ".#{}")


def audit_data(config: ConfigDict, output: str) -> Outcome:
    """Audit the whole training split, write the page and the CSV to the folder `output`, and return a summary.

    If `output` is "", the folder is AUDIT_FOLDER. Rows that a person has edited in the CSV of an earlier audit are
    kept, also if they are edited while this audit runs. Raises UserError if the data cannot be opened or no label can
    be judged.
    """
    folder = Folder(output or AUDIT_FOLDER)
    folder.require_creatable()
    config = probe_config(config)
    name = config.data.corrections
    applied = [resolve_path(config.data, name)] if name else []
    audit = audit_split(open_split(config.data, config.data.train_split, seed=config.seed), config)
    with folder.writing(wait=True):
        audit = replace(audit, answered={row.key for row in read_edited(folder, applied, strict=False) if row.answer})
        folder.write_text(PAGE, audit_page(audit, config))
        path = _write_suggestions(folder, audit, applied)
    shown = path.resolve() if folder.is_local else path
    status(
        f"look at {folder / PAGE}, write yes or no into the column accept of {shown}, and train with "
        f"{shlex.quote(f'--config.data.corrections={shown}')}"
    )
    return Outcome([audit_text(audit)], audit_document(audit))


def _write_suggestions(folder: Folder, audit: Audit, applied: Sequence[str]) -> epath.Path:
    """Write the table of suggestions to a folder, with the rows that a person has edited, and return its path.

    The edited rows are from `read_edited`. If an earlier CSV cannot be read or is open in an editor, the table is
    written to a file with a new name.
    """
    path, kept, strict = folder / SUGGESTIONS, [], True

    def content() -> bytes:
        kept[:] = read_edited(folder, applied, strict=strict)
        return suggestions_table(audit, kept).csv().encode(errors="backslashreplace")

    try:
        for name in (pattern.format(SUGGESTIONS) for pattern in _EDITOR_FILES):
            if folder.is_local and os.path.lexists(folder / name):
                raise UserError(f"{folder / SUGGESTIONS} is open in an editor, as {name} says; close it")
        folder.update(path.name, content)
    except UserError as error:
        strict = False
        path = next(path for n in itertools.count(2) if not (path := folder / f"suggestions-{n}.csv").exists())
        _logger.warning("%s; until then, the suggestions are in %s", error, path)
        folder.update(path.name, content)
    if kept:
        status(f"{quantity(len(kept), 'row')} with answers or notes kept")
    return path


def read_edited(folder: Folder, applied: Sequence[str], *, strict: bool) -> list[Suggestion]:
    """Return the rows that a person has edited, from all CSV files of suggestions in a folder and from `applied`.

    `applied` are the paths of further CSV files. If two files give equal answers to a suggestion, the result has one
    row for it. If the answers differ, it has both rows, and `correct_labels` refuses them. An invalid file raises
    UserError if `strict`; otherwise it is left out.
    """
    rows, answered = {}, set()  # content of a row -> the row, because two files may have it; keys, also with answers
    for path in [*folder.path.glob(SUGGESTIONS), *sorted(folder.path.glob("suggestions-[0-9]*.csv")), *applied]:
        with contextlib.nullcontext() if strict else contextlib.suppress(UserError):
            edited = [row for row in read_suggestions(path) if row.is_edited]
            new = [row for row in edited if ((row.key, row.answer) if row.answer else row.key) not in answered]
            answered |= {mark for row in new if row.answer for mark in (row.key, (row.key, row.answer))}
            rows |= {frozenset(filter(all, row.cells.items())): row for row in new}
    return list(rows.values())


def suggestions_table(audit: Audit, kept: Sequence[Suggestion] = ()) -> Table:
    """Return a table for `data.corrections`: new suggestions, then the rows `kept` that a person has edited."""
    columns = list(dict.fromkeys([*COLUMNS, *(name for row in kept for name in row.cells)]))
    known = {row.key for row in kept}
    suggested = (audit.suggestion(*place) for place in audit.suggestions.tolist())
    rows = [*(row for row in suggested if row.key not in known), *kept]
    return Table(columns, [[row.cells.get(name, "") for name in columns] for row in rows])


def audit_document(audit: Audit) -> dict[str, Any]:
    """Return the content of the audit as a dict that can be written as JSON.

    Keys: `split`, `images` (number), `missing` and `superfluous` (numbers of suggestions that add or remove a label),
    `suggestions`, `similar_images_with_other_labels` (pairs of ids), `together` (pairs of labels, with the share of the
    images with the first label that also have the second), and `not_judged` (reason -> names of labels).
    """
    split, names = audit.split, audit.split.classes
    missing = sum(audit.is_missing(row, label) for row, label in audit.suggestions.tolist())
    suggestions = suggestions_table(audit).values()
    for row in suggestions:
        del row["accept"]
    return {
        "split": split.name,
        "images": len(split),
        "missing": missing,
        "superfluous": len(audit.suggestions) - missing,
        "suggestions": suggestions,
        "similar_images_with_other_labels": [[split.ids[i], split.ids[j]] for i, j in audit.twins],
        "together": [{"label": names[p.a], "with": names[p.b], "share": p.p_b_given_a} for p in audit.pairs],
        "not_judged": audit.not_judged(),
    }


def audit_text(audit: Audit) -> str:
    """Return the summary of the audit to print: numbers of suggestions, and the labels that were not judged."""
    values = audit_document(audit)
    text = (
        f"{quantity(values['images'], 'image')} of split {values['split']}: {values['missing']:,} missing and "
        f"{values['superfluous']:,} superfluous labels suggested on {quantity(len(audit.worst_images), 'image')}"
    )
    return "\n".join([text, *audit.sentences()])
