"""Build the site of the documentation into build/docs/site; needs the extra "docs", and no network.

    python -m tools.docs.build_site                              # links to files of the repository become text
    python -m tools.docs.build_site --repository=https://HOST/OWNER/mlmoe_jax/blob/main    # and now they are links
    python -m tools.docs.build_site --run-notebooks              # run them first, and store their outputs (extra "dev")

The site has the pages of docs/, the Markdown files of the root, CITATION.cff, and the notebooks with stored outputs.
They can be opened as files and load nothing from elsewhere. Only the search needs a server, whose command is printed.
"""

from __future__ import annotations

import argparse
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import nbformat

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
BUILD = REPOSITORY / "build" / "docs"
SETTINGS = DOCS / "zensical.toml"
PREFIX = "docs/"
FILES = (".md", ".ipynb", ".svg", ".png", ".css")

# Pages outside docs/, by their place in the repository -> their place in the site.
ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CITATION.cff": "citation.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
# A link or image of Markdown, outside code; the address without title, and its anchor.
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s#]*)(#[^()\s]*)?\)")
# Without a server, the search would load this program from another site.
SHIM = re.compile(r"<script[^>]*iframe-worker/shim[^>]*></script>")
CODE = re.compile(r"(^ *```.*?^ *```[^\n]*$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def place_of(path: str) -> str | None:
    """Return where a file of the repository is in the site, or None if it is not there."""
    if path in ELSEWHERE:
        return ELSEWHERE[path]
    inside = path.removeprefix(PREFIX)
    if inside == path or not (REPOSITORY / path).is_file():
        return None
    return re.sub(r"\.ipynb$", ".md", inside) if Path(path).suffix in FILES else None


def outside_code(text: str, change) -> str:
    """Return Markdown with `change` applied to everything but code."""
    code: list[str] = []

    def keep(match: re.Match) -> str:
        code.append(match[0])
        return f"\x00{len(code) - 1}\x00"

    return re.sub(r"\x00(\d+)\x00", lambda match: code[int(match[1])], change(CODE.sub(keep, text)))


def relinked(text: str, path: str, repository: str = "") -> str:
    """Return a page with the links of the site.

    Args:
        text: The Markdown of the page.
        path: The path of the page in the repository.
        repository: The address for links to files that are not in the site; without it, these links become text.
    """
    here = posixpath.dirname(place_of(path) or "")

    def link(match: re.Match) -> str:
        image, label, address, anchor = match[1], match[2], match[3], match[4] or ""
        if not address or re.match(r"[a-z]+:", address):
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), address))
        place = place_of(target)
        if place is not None:
            return f"{image}[{label}]({posixpath.relpath(place, here or '.')}{anchor})"
        return f"[{label}]({repository.rstrip('/')}/{target})" if repository else label

    return outside_code(text, lambda rest: LINK.sub(link, rest))


def executed(path: Path, folder: Path, first: str = "") -> nbformat.NotebookNode:
    """Run a notebook in a folder and return it with its outputs, without what it writes to stderr.

    first: a program to run before its cells. Raises CellExecutionError for a cell that fails.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    cells = list(notebook.cells)
    notebook.cells = [nbformat.v4.new_code_cell(first), *cells]
    NotebookClient(notebook, timeout=1200, record_timing=False, resources={"metadata": {"path": str(folder)}}).execute()
    notebook.cells = cells
    for number, cell in enumerate(one for one in cells if one.cell_type == "code"):
        cell.execution_count = number + 1
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.outputs:
            output.pop("execution_count", None)
            output.get("data", {}).pop("image/jpeg", None)  # Pillow shows images in both formats
    return notebook


def run_notebooks() -> None:
    """Run the notebooks of docs/ and store their outputs in them."""
    import nbformat

    for path in sorted(DOCS.rglob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(executed(path, Path(folder)), path)


def write_notebook(path: Path, target: Path) -> None:
    """Write a notebook with its stored outputs as a page, and its images beside it; nothing is run."""
    from nbconvert import MarkdownExporter

    text, resources = MarkdownExporter().from_filename(
        str(path), resources={"unique_key": path.stem, "output_files_dir": f"{path.stem}_files"}
    )
    target.write_text(text)
    for name, content in resources["outputs"].items():
        image = target.parent / name
        image.parent.mkdir(exist_ok=True)
        image.write_bytes(content)


def write_pages(folder: Path, repository: str = "") -> None:
    """Write all pages of the site as Markdown into an empty folder."""
    for path in sorted([*DOCS.rglob("*"), *map(REPOSITORY.joinpath, ELSEWHERE)]):
        name = path.relative_to(REPOSITORY).as_posix()
        if (place := place_of(name)) is None:
            continue
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            target.write_text(relinked(path.read_text(), name, repository))
        elif path.suffix == ".ipynb":
            write_notebook(path, target)
        elif path.suffix == ".cff":
            text = "Please cite the software, and the papers of the methods that you use."
            target.write_text(f"# Citation\n\n{text}\n\n```yaml\n{path.read_text()}```\n")
        else:
            shutil.copy(path, target)


def settings_for(folder: Path) -> str:
    """Return the settings of the site, with the pages of `folder` in its navigation."""
    lines = SETTINGS.read_text().splitlines(keepends=True)
    pages = [re.search(r'= "([\w/-]+\.md)"', line) for line in lines]
    text = "".join(line for line, page in zip(lines, pages, strict=True) if not page or (folder / page[1]).exists())
    tomllib.loads(text)
    return text


def build(folder: Path = BUILD, repository: str = "") -> Path:
    """Build the site below `folder`, which is replaced, and return the folder with its index.html.

    Raises CalledProcessError for a link to a page or a heading that does not exist.
    """
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "pages").mkdir(parents=True)
    write_pages(folder / "pages", repository)
    (folder / "zensical.toml").write_text(settings_for(folder / "pages"))
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    subprocess.run(command, cwd=folder, check=True, env=os.environ | {"NO_COLOR": "1"})
    for page in (folder / "site").rglob("*.html"):
        page.write_text(SHIM.sub("", page.read_text()))
    return folder / "site"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", default="", help="address below which the files of the repository can be read")
    parser.add_argument("--run-notebooks", action="store_true", help="run the notebooks first, and store their outputs")
    options = parser.parse_args()
    if options.run_notebooks:
        run_notebooks()
    try:
        folder = os.path.relpath(build(repository=options.repository))
        print(f"open {folder}/index.html, or, for the search, http://127.0.0.1:8000 after this command:")
        print(f"python -m http.server --bind=127.0.0.1 --directory={folder} 8000")
    except subprocess.CalledProcessError as error:  # the lines above say why
        sys.exit(error.returncode)
