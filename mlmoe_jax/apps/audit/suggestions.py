"""`--mode=data --audit`: write the suggested corrections of labels as a page with images and as a CSV."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from mlmoe_jax.apps.audit.audit import MIN_IMAGES, Audit, audit_split, fold_units, probe_config
from mlmoe_jax.apps.audit.audit_page import audit_page
from mlmoe_jax.data.label_codes import NEGATIVE, POSITIVE
from mlmoe_jax.data.sources.corrections import CELL_OF, COLUMNS, Correction, read_corrections
from mlmoe_jax.data.sources.open import open_split, resolve_path
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.storage import Folder
from mlmoe_jax.runtime.table import Outcome, Table
from mlmoe_jax.runtime.text import abbreviate, quantity

AUDIT_FOLDER, SUGGESTIONS, PAGE = "audit", "suggestions.csv", "audit.html"


def audit_data(config: ConfigDict, output: str) -> Outcome:
    """Audit the whole training split, write the page and the CSV to the folder `output`, and return a summary.

    Args:
      config: the config of the data set and the backbone.
      output: the folder to write to; "" = AUDIT_FOLDER.

    Raises:
      UserError: the data cannot be opened, no label can be judged, or the CSV in the folder has accepted suggestions,
        which would be overwritten.
    """
    folder = Folder(output or AUDIT_FOLDER)
    folder.require_creatable()
    path = folder / SUGGESTIONS
    if path.exists() and (accepted := read_corrections(path)):
        raise UserError(
            f"{path} has {quantity(len(accepted), 'accepted correction')}, which a new audit would overwrite; name "
            "another --output, or move the file"
        )
    config = probe_config(config)
    name = config.data.corrections
    corrected = read_corrections(resolve_path(config.data, name)) if name else ()
    audit = audit_split(open_split(config.data, config.data.train_split, seed=config.seed), config)
    page = audit_page(audit, config)
    with folder.writing():
        folder.write_text(SUGGESTIONS, suggestions_table(audit, corrected).csv())
        folder.write_text(PAGE, page)
    shown = path.resolve() if folder.is_local else path
    status(
        f"look at {folder / PAGE}, write yes into the column accept of {shown} where a suggestion is right, and train "
        f"with {shlex.quote(f'--config.data.corrections={shown}')}"
    )
    return Outcome([audit_text(audit)], audit_document(audit))


def suggestions_table(audit: Audit, corrected: Sequence[Correction] = ()) -> Table:
    """Return the table of corrections, in the format of the file `data.corrections`.

    Args:
      audit: the audit. Each suggestion is a row that is not accepted yet.
      corrected: accepted corrections of earlier audits. Each is a row with "yes" in the column `accept`.
    """
    split, rows = audit.split, []
    for row, label in audit.suggestions.tolist():
        suggested = POSITIVE if audit.is_missing(row, label) else NEGATIVE
        score = f"{audit.confidence[row, label]:.6f}"
        given = CELL_OF[int(split.labels[row, label])]
        rows.append([split.ids[row], split.classes[label], given, CELL_OF[suggested], score, ""])
    for correction in corrected:
        code = CELL_OF[correction.code]
        rows.append([correction.image, correction.label, code, code, "", "yes"])
    return Table(COLUMNS, rows)


def audit_document(audit: Audit) -> dict[str, Any]:
    """Return the content of the audit as a dict that can be written as JSON.

    Keys: `split`, `images` (number), `missing` and `superfluous` (numbers of suggestions that add or remove a label),
    `suggestions`, `similar_images_with_other_labels` (pairs of ids), `together` (pairs of labels with their share), and
    `not_judged` (names of labels).
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
        "not_judged": [name for name, judged in zip(names, audit.judged, strict=True) if not judged],
    }


def audit_text(audit: Audit) -> str:
    """Return the summary of the audit to print: numbers of suggestions, and the labels that were not judged."""
    values = audit_document(audit)
    text = (
        f"{quantity(values['images'], 'image')} of split {values['split']}: {values['missing']:,} missing and "
        f"{values['superfluous']:,} superfluous labels suggested on {quantity(len(audit.worst_images), 'image')}"
    )
    if values["not_judged"]:
        text += (
            f"\nnot judged, because fewer than {MIN_IMAGES} {fold_units(audit.split)} have the label or are known not "
            f"to have it: {abbreviate(values['not_judged'])}"
        )
    return text
