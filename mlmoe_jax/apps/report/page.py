"""Write one self-contained HTML file about a run, which needs no network, no other file and no server."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from etils import epath

from mlmoe_jax.apps.report import labels, mistakes, result_sections, samples, training
from mlmoe_jax.apps.report.components import Section
from mlmoe_jax.apps.report.run_files import COST, RunFiles
from mlmoe_jax.errors import UserError
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime.files import damage_explained
from mlmoe_jax.runtime.formats import dump_json
from mlmoe_jax.runtime.version import __version__

REPORT = "report.html"
_HERE = Path(__file__).parent
_SCRIPTS = ("page.js", "samples.js")


def write_report(
    folder: RunFolder, *, against: RunFolder | None = None, output: str | Path | None = None, cost: bool = False
) -> epath.Path:
    """Write the page about a run, and return its path.

    Training may still be running. The page shows the available files, and has the commands that create missing files.

    Args:
      folder: the run folder. Its files are read, and nothing is computed on a device.
      against: another run to compare with.
      output: path of the page; default: report.html in the folder.
      cost: count parameters and multiply-adds by tracing the model (seconds), and write cost.json to the folder.

    Raises:
      UserError: the folder is not a run folder, a file in it is damaged, the runs cannot be compared, or the output
        cannot be written.
    """
    files = RunFiles(folder)
    other = None if against is None else RunFiles(against)
    if other is not None and other.name == files.name:
        files.name, other.name = str(files.folder), str(other.folder)
    if cost:
        from mlmoe_jax.apps.tools.preflight.cost import count_cost

        folder.write_json(COST, count_cost(files.config))
    bundle = vega_bundle()
    with damage_explained(f"a file in {folder}" if other is None else f"a file in {folder} or {against}"):
        page = render(files, other, bundle)
    target = folder / REPORT if output is None else epath.Path(output)
    try:
        RunFolder(target.parent).write_text(target.name, page)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}") from error
    return target


def sections(files: RunFiles, other: RunFiles | None, judged: mistakes.ThresholdedScores | None) -> list[Section]:
    """Return all sections of the page in order."""
    return [
        training.header(files),
        mistakes.list_images(files, judged),
        mistakes.mistakes(files, judged),
        result_sections.metrics(files),
        result_sections.list_labels(files),
        result_sections.thresholds(files),
        training.training_curves(files),
        result_sections.differences(files, other),
        labels.groups(files),
        samples.gates(files),
        samples.attention(files),
        result_sections.score_curves(files),
        training.cost(files),
        training.settings(files),
    ]


def render(files: RunFiles, other: RunFiles | None, bundle: str) -> str:
    """Return the page about a run, compared with `other`. `bundle` is the JavaScript that draws charts."""
    judged = mistakes.apply_thresholds(files)
    return render_page(
        files.name,
        "Run report",
        sections(files, other, judged),
        images=samples.images(files) | ({} if judged is None else judged.thumbnails),
        shared=samples.shared_data(files),
        bundle=bundle,
    )


def render_page(
    title: str,
    kind: str,
    parts: Sequence[Section],
    *,
    images: Mapping[str, bytes],
    shared: Mapping[str, Any] | None = None,
    bundle: str = "",
) -> str:
    """Return a page of sections.

    A content security policy restricts the page to its own scripts and forbids all loading, so neither a library nor a
    label name with markup can reach the network.

    Args:
      title: the title of the page.
      kind: the kind of the page, such as "Run report".
      parts: the sections.
      images: the JPEG files of the images, by name.
      shared: the data that widgets share, as in `samples.shared_data`.
      bundle: the JavaScript that draws charts.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies |= {"json.dumps_function": dump_json, "json.dumps_kwargs": {}}
    scripts = [_inline(bundle), _inline("\n".join((_HERE / name).read_text() for name in _SCRIPTS))]
    return environment.get_template("page.html").render(
        title=title,
        kind=kind,
        sections=parts,
        samples=shared or {},
        images={
            name: "data:image/jpeg;base64," + base64.b64encode(content).decode() for name, content in images.items()
        },
        style=(_HERE / "style.css").read_text(),
        scripts=scripts,
        hashes=["sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts],
        written=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        version=__version__,
    )


@cache
def vega_bundle() -> str:
    """Return the Vega libraries as one self-contained script (about 0.9 MB; takes a few seconds)."""
    import altair
    import vl_convert

    return vl_convert.javascript_bundle(vl_version=".".join(altair.SCHEMA_VERSION.lstrip("v").split(".")[:2]))


def _inline(script: str) -> str:
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")
