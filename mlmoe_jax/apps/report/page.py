"""Write one self-contained HTML file about a run. The file needs no network, no other file and no server."""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from etils import epath

from mlmoe_jax.apps.report import labels, mistakes, result_sections, samples, training
from mlmoe_jax.apps.report.components import Section
from mlmoe_jax.apps.report.run_files import COST, RunFiles
from mlmoe_jax.errors import UserError
from mlmoe_jax.runs import folder as names
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runtime.files import damage_explained
from mlmoe_jax.runtime.formats import dump_json
from mlmoe_jax.runtime.storage import named_file
from mlmoe_jax.runtime.version import __version__

REPORT = "report.html"
_HERE = Path(__file__).parent
_SCRIPTS = ("page.js", "samples.js")


# -------------------------------------------------------------------------------------------------------- sections
@dataclass(frozen=True)
class Need:
    """The data that a section of the report requires.

    Attributes:
      data: an attribute of `RunFiles`, which may be dotted. The data is missing if its value is None or empty.
      missing: the sentence on the page if the data is missing.
      command: the mode and the flags of the command that creates the data; "" if there is no such command.
      file: the name of the file with the data, for errors.
    """

    data: str
    missing: str
    command: str = ""
    file: str = names.RESULTS


@dataclass(frozen=True)
class SectionKind:
    """The definition of a section of the report; `parts` returns its components, from the data that it `needs`."""

    name: str
    title: str
    parts: Callable[[RunFiles], Sequence[Any]]
    needs: tuple[Need, ...] = ()

    def describe(self, files: RunFiles) -> Section:
        """Return the section; without parts if data is missing. UserError if a needed file is damaged."""
        used = [need.file for need in self.needs] or [names.CONFIG, names.METRICS, names.RESULTS]
        with damage_explained(f"one of {', '.join(used)} in {files.folder}" if used[1:] else files.folder / used[0]):
            for need in self.needs:
                if not attrgetter(need.data)(files):
                    command = files.command(*need.command.split()) if need.command else ""
                    return Section(self.name, self.title, missing=need.missing, command=command)
            return Section(self.name, self.title, self.parts(files))


_SCORES = Need("raw", "Scores are written when training ends, or by an evaluation:", "eval", names.SCORES)
_RESULTS = Need("results", "results.json is written when training ends, or by an evaluation:", "eval")
_LABELS = Need(
    "per_class", "per_class.csv is written when training ends, or by an evaluation:", "eval", names.PER_CLASS
)
_THRESHOLDS = Need(
    "thresholds",
    "thresholds.json is written when training starts, or fitted to the scores of a split:",
    "thresholds",
    names.THRESHOLDS,
)
_ROWS = Need(
    "rows",
    "metrics.jsonl is written from the first logged step on; a fit to convergence has no steps.",
    file=names.METRICS,
)
_OTHER = Need(
    "other",
    "This page is about one run. To compare it with another run, put its folder in place of OTHER:",
    "report --against=OTHER",
)
_SPACE = Need("label_space", "label_space.npz is written when training starts.", file=names.LABEL_SPACE)
_SAMPLES = Need(
    "samples",
    "The run keeps no sample images (config.report.samples is 0); an evaluation adds them:",
    "eval --config.report.samples=16",
    names.SAMPLE_INDEX,
)
_GATES = Need("samples.gates", "This model has no gates over experts.", file=names.SAMPLE_ARRAYS)
_ATTENTION = Need("samples.attention", "The head of this model has no attention maps.", file=names.SAMPLE_ARRAYS)
_COST = Need(
    "cost",
    "Parameters and multiply-adds are not counted yet; this counts them:",
    "report --cost",
    COST,
)
SECTION_KINDS = (
    SectionKind("summary", "Summary", training.header),
    SectionKind("images", "Images", mistakes.show_images, (_SCORES,)),
    SectionKind("mistakes", "Most confident mistakes", mistakes.mistakes, (_SCORES,)),
    SectionKind("metrics", "Metrics", result_sections.metrics, (_RESULTS,)),
    SectionKind("labels", "Labels", result_sections.list_labels, (_LABELS,)),
    SectionKind("thresholds", "Thresholds", result_sections.thresholds, (_THRESHOLDS,)),
    SectionKind("curves", "Training curves", training.training_curves, (_ROWS,)),
    SectionKind("differences", "Differences from another run", result_sections.differences, (_OTHER,)),
    SectionKind("groups", "Label groups and co-occurrence", labels.groups, (_SPACE,)),
    SectionKind("gates", "Gates: the experts of each label", samples.gates, (_SAMPLES, _GATES)),
    SectionKind("attention", "Attention over the image", samples.attention, (_SAMPLES, _ATTENTION)),
    SectionKind("scores", "Precision, recall and calibration", result_sections.score_curves, (_SCORES,)),
    SectionKind("cost", "Cost", training.cost, (_COST,)),
    SectionKind("config", "Config and versions", training.settings),
)


# ---------------------------------------------------------------------------------------------------------- page
def write_report(
    folder: RunFolder, *, against: RunFolder | None = None, output: str | Path | None = None, cost: bool = False
) -> epath.Path:
    """Write the page about a run from the files of its folder, without running the model, and return its path.

    Training may still be running. Sections whose data is missing show the command that creates the data.

    Args:
      against: the folder of another run to compare with; None = no comparison.
      output: path of the page; default: report.html in the folder.
      cost: count parameters and multiply-adds by tracing the model (seconds), and write cost.json to the folder.

    Raises:
      UserError: the folder is not a run folder, a file in it is damaged, the runs cannot be compared, or the output
        has another suffix than .html or cannot be written.
    """
    if output and Path(output).suffix != ".html":
        raise UserError(f"--output={output} should be an .html file")
    files = RunFiles(folder, None if against is None else RunFiles(against))
    if files.other and files.other.name == files.name:
        files.name, files.other.name = str(files.folder), str(files.other.folder)
    if cost:
        from mlmoe_jax.apps.tools.preflight.cost import count_cost

        folder.write_json(COST, count_cost(files.config))
    bundle = vega_bundle()
    page = render(files, bundle)
    target = folder / REPORT if output is None else named_file(output)
    try:
        RunFolder(target.parent).write_text(target.name, page)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}") from error
    return target


def render(files: RunFiles, bundle: str) -> str:
    """Return the HTML page about a run. `bundle` is the JavaScript library that draws charts, see `vega_bundle`."""
    sections = [kind.describe(files) for kind in SECTION_KINDS]
    with damage_explained(files.folder / names.SAMPLE_INDEX):
        shared = samples.shared_data(files)
    return render_page(files.name, "Run report", sections, images=files.images, shared=shared, bundle=bundle)


def render_page(
    title: str,
    kind: str,
    parts: Sequence[Section],
    *,
    images: Mapping[str, bytes],
    shared: Mapping[str, Any] | None = None,
    bundle: str = "",
) -> str:
    """Return an HTML page with the given sections.

    A content security policy allows only the scripts in the page and forbids all loading. Therefore, neither a library
    nor a label name that contains markup can access the network.

    Args:
      kind: the kind of the page, such as "Run report".
      images: name of an image -> content of its JPEG file.
      shared: the data that several widgets use, as `samples.shared_data` returns it; None = no data.
      bundle: the JavaScript library that draws charts; "" if the page has no charts.
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
    """Return the Vega libraries as one self-contained script of about 0.9 MB. The call takes a few seconds."""
    import altair
    import vl_convert

    return vl_convert.javascript_bundle(vl_version=".".join(altair.SCHEMA_VERSION.lstrip("v").split(".")[:2]))


def _inline(script: str) -> str:
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")
