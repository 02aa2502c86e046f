"""Write one self-contained HTML file about a run: no network, no other file, no server."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from etils import epath

from mlmoe_jax.apps.report import labels, mistakes, results, samples, scores, training
from mlmoe_jax.apps.report.components import Section
from mlmoe_jax.apps.report.resampling import resample
from mlmoe_jax.apps.report.run_files import COST, RunFiles
from mlmoe_jax.errors import UserError
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime.formats import to_json
from mlmoe_jax.runtime.version import __version__

REPORT = "report.html"
_HERE = Path(__file__).parent
_SCRIPTS = ("page.js", "samples.js")


def write_report(
    folder: RunFolder,
    *,
    against: RunFolder | None = None,
    output: str | Path | None = None,
    cost: bool = False,
) -> epath.Path:
    """Write the page about a run, and return its path.

    Training may still be running: the page shows the available files, and explains how to create the missing ones.

    Args:
      folder: the run. Its files are read, and nothing is computed on a device.
      against: another run to compare with. Images on which the runs differ are read from the data set of the run.
      output: path of the page; default: report.html in the folder.
      cost: count parameters and multiply-adds by tracing the model (seconds), and write cost.json to the folder.

    Raises:
      UserError: the folder is not a run folder, a file in it is damaged, the runs cannot be compared, or the
        output cannot be written.
    """
    files = RunFiles(folder)
    other = None if against is None else RunFiles(against)
    if other is not None:
        files.name_apart(other)
    if cost:
        from mlmoe_jax.apps.tools.preflight.cost import summarize

        folder.write_json(COST, summarize(files.config))
    page = render(sections(files, other), files, vega_bundle())
    target = folder / REPORT if output is None else epath.Path(output)
    try:
        RunFolder(target.parent).write_text(target.name, page)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}") from error
    return target


def sections(files: RunFiles, other: RunFiles | None = None) -> list[Section]:
    """Return all sections of the page in order; arguments as in `write_report`."""
    resampled, judged = resample(files), mistakes.judge(files)
    return [
        training.header(files, resampled),
        training.curves(files),
        results.metrics(files, judged),
        results.per_class(files, resampled),
        results.differences(files, other),
        labels.groups(files),
        samples.gates(files),
        samples.attention(files),
        scores.curves(files),
        mistakes.mistakes(files, judged),
        mistakes.confusion(files, judged),
        mistakes.images(files, judged),
        results.thresholds(files),
        training.cost(files),
        training.settings(files),
    ]


def render(parts: Sequence[Section], files: RunFiles, bundle: str) -> str:
    """Return the page. bundle: the JavaScript that draws charts.

    A content security policy restricts the page to its own scripts and forbids all loading, so neither a label name
    that contains markup nor a library can reach the network.
    """
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"json": _json, "breakable": _breakable}
    scripts = [_inline(bundle), _inline("\n".join((_HERE / name).read_text() for name in _SCRIPTS))]
    return environment.get_template("page.html").render(
        title=files.name,
        sections=parts,
        samples=samples.shared(files),
        style=Markup((_HERE / "style.css").read_text()),
        scripts=[Markup(script) for script in scripts],
        hashes=[_hash(script) for script in scripts],
        written=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        version=__version__,
    )


@cache
def vega_bundle() -> str:
    """Return the Vega libraries as one self-contained script (about 0.9 MB; takes a few seconds)."""
    import altair
    import vl_convert

    return vl_convert.javascript_bundle(vl_version=".".join(altair.SCHEMA_VERSION.lstrip("v").split(".")[:2]))


def _json(value: Any) -> Any:
    """Return JSON for a script element, escaped so that no content can close the element."""
    from markupsafe import Markup

    return Markup(to_json(value).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _breakable(name: str) -> Any:
    """Return a name in which lines may break after / and _, for narrow screens."""
    from markupsafe import Markup, escape

    return Markup(re.sub("([/_])", r"\1<wbr>", str(escape(name))))


def _inline(script: str) -> str:
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
