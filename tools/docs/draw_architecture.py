"""Draw `docs/architecture.svg` from the imports of the package, so that the drawing cannot differ from the code.

    python -m tools.docs.draw_architecture

`tests/test_architecture.py` reads the imports in the same way, and fails if the committed image is not up to date.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from tools.docs.source import parse_source

REPOSITORY = Path(__file__).resolve().parents[2]
ROOT, IMAGE = REPOSITORY / "mlmoe_jax", REPOSITORY / "docs" / "architecture.svg"
PUBLIC = "mlmoe_jax"  # the package's own __init__.py, which holds the public names
# A text that names what is imported later: "package.module:attribute", or a module alone.
REFERENCE = re.compile(rf"{PUBLIC}(\.\w+)+(:\w+)?")
AT_ONCE, LATER, NAMED = "at once", "later", "named"

# Each layer may use the layers below it. Packages in the same layer do not use one another.
LAYERS = (
    (PUBLIC, "main"),
    ("apps",),
    ("training",),
    ("evaluation",),
    ("inference",),
    ("runs",),
    ("config", "pretrained"),
    ("models",),
    ("data",),
    ("runtime",),
    ("errors",),
)
LAYER_OF = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}
PACKAGES = tuple(package for packages in LAYERS[1:-1] for package in packages)  # the folders


# --------------------------------------------------------------------------------------------------------- imports
@dataclass(frozen=True)
class Import:
    """One import inside the package; modules are named from the package's folder, such as `data.sources.voc`.

    when: AT_ONCE, when the module is imported; LATER, in a function or for type checkers only; NAMED, by a text in a
    table of names.
    """

    source: str
    target: str
    line: int
    when: str

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


def modules(package: Path = ROOT) -> dict[str, Path]:
    """Return every module of the package by its name, PUBLIC for the package itself."""
    paths = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        paths[".".join(part for part in parts if part != "__init__") or PUBLIC] = path
    return paths


def read_imports(package: Path = ROOT) -> list[Import]:
    """Return every import of a module of the package by another, also those inside functions."""
    known = modules(package)
    imports = []
    for source, path in known.items():
        for name, line, when in _references(parse_source(path.read_text()), AT_ONCE):
            target = _module(name, known)
            if target not in (None, source):
                imports.append(Import(source, target, line, when))
    return imports


def package_of(module: str) -> str:
    """Return the package that a module is in."""
    return module.partition(".")[0]


def _references(node: ast.AST, when: str) -> Iterator[tuple[str, int, str]]:
    """Yield the dotted name and line of everything below a node that is imported, and when."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, child.lineno, when) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from ((f"{child.module}.{alias.name}", child.lineno, when) for alias in child.names)
        elif isinstance(child, ast.Constant) and isinstance(child.value, str) and REFERENCE.fullmatch(child.value):
            yield child.value.replace(":", "."), child.lineno, NAMED
        else:
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from _references(child, LATER if function or typing else when)


def _module(name: str, known: dict[str, Path]) -> str | None:
    """Return the module that a dotted name is, or is defined in; None for one of another package."""
    package, _, inside = name.partition(".")
    if package != PUBLIC:
        return None
    while inside and inside not in known:
        inside = inside.rpartition(".")[0]
    return inside or PUBLIC


# --------------------------------------------------------------------------------------------------------- sentences
def sentence(package: str) -> str:
    """Return the docstring of a package's `__init__.py`."""
    return ast.get_docstring(parse_source((ROOT / package / "__init__.py").read_text())) or ""


def may_use(package: str) -> str:
    """Return the clause with which the sentence of a package has to end."""
    *layers, _ = LAYERS[LAYER_OF[package] + 1 :]  # the last one holds no package
    if not layers:
        return "; may use no other package."
    return f"; may use {', '.join(layers[0])}{' and the packages below' if len(layers) > 1 else ''}."


def purpose(package: str) -> str:
    """Return what a package is for, in the words of its own docstring if it is a folder."""
    if package in PACKAGES:
        return sentence(package).partition("; may use")[0].replace("`", "") + "."
    return {
        PUBLIC: "The public names (as mm).",
        "main": "The program: starts apps/cli.",
        "errors": "UserError: one sentence that says what to put right.",
    }[package]


# ----------------------------------------------------------------------------------------------------------- drawing
WIDTH, LEFT, BOX, GAP = 1280, 24, 604, 14
ROW, PAIR, TOP = 66, 112, 92  # heights of a layer with one package, a layer with two, and the heading
FIRST_LANE, LANE = LEFT + BOX + 44, 58
CHIPS = 132  # from the edge of a box to its first subpackage
INK, MUTED, PAPER, FILL, EDGE, CHIP = "#1f2933", "#52606d", "#ffffff", "#f5f7fa", "#9aa5b1", "#dde5ee"
GUIDE = "#e4e7eb"
# One color for each lane, dark enough on white; neighbors differ clearly.
COLORS = (
    *("#7c3aed", "#0f766e", "#b45309", "#1d4ed8", "#be185d", "#4d7c0f", "#0e7490", "#c2410c", "#6d28d9", "#1e3a5f"),
    MUTED,
)
FONT = "font-family:'Helvetica Neue',Helvetica,Arial,'Liberation Sans','DejaVu Sans',sans-serif"


@dataclass(frozen=True)
class Box:
    """Where a package is drawn; `enter` and `leave`: the heights of the incoming and outgoing lines."""

    x: float
    y: float
    width: float
    height: float
    enter: float
    leave: float

    @property
    def right(self) -> float:
        """The x of the right edge."""
        return self.x + self.width


def boxes() -> dict[str, Box]:
    """Return the box of every package, layer under layer."""
    placed, y = {}, TOP
    for packages in LAYERS:
        if len(packages) == 1:
            height = ROW - GAP
            placed[packages[0]] = Box(LEFT, y, BOX, height, y + 0.3 * height, y + 0.7 * height)
            y += ROW
            continue
        height, half = PAIR - GAP, (BOX - GAP) / 2
        placed[packages[0]] = Box(LEFT, y, half, height, y + 6, y + height - 6)
        placed[packages[1]] = Box(LEFT + half + GAP, y + 14, half, height - 28, y + 0.38 * height, y + 0.66 * height)
        y += PAIR
    return placed


def draw() -> str:
    """Return the image as SVG text; the same code gives the same text."""
    placed = boxes()
    uses = {(package_of(one.source), package_of(one.target)) for one in read_imports()}
    targets = [package for packages in LAYERS[1:] for package in packages]
    lane = {package: FIRST_LANE + LANE * index for index, package in enumerate(targets)}
    color = dict(zip(targets, COLORS, strict=True))
    bottom = max(box.y + box.height for box in placed.values())
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 24:g}" width="{WIDTH}" '
        f'height="{bottom + 24:g}" style="{FONT}" role="img" aria-labelledby="title">',
        '<title id="title">The packages of mlmoe_jax and their imports</title>',
        f'<rect width="100%" height="100%" fill="{PAPER}"/>',
        _text(LEFT, 38, "The packages of mlmoe_jax", size=22, weight=700),
        _text(
            LEFT, 64, "A dot on the line of a package: the package imports the one at the arrow.", size=14, fill=MUTED
        ),
    ]
    for source, box in placed.items():
        used = [target for target in targets if (source, target) in uses and target != source]
        lines += _leaving(box, [lane[target] for target in used])
    for target in targets:
        users = [placed[source] for source in placed if (source, target) in uses and source != target]
        lines += _lane(target, placed[target], lane[target], color[target], users)
    for package, box in placed.items():
        lines += _package(package, box, color.get(package, INK))
    return "\n".join([*lines, "</svg>", ""])


def _leaving(box: Box, lanes: Sequence[float]) -> list[str]:
    """Return the line from a package to the farthest lane that it uses."""
    if not lanes:
        return []
    return [f'<path d="M{box.right:g} {box.leave:g}H{max(lanes):g}" stroke="{EDGE}" stroke-width="1.25" fill="none"/>']


def _lane(target: str, box: Box, x: float, color: str, users: Sequence[Box]) -> list[str]:
    """Return the lane that leads down to a package, with a dot for each of its users."""
    if not users:
        return []
    tip, top, turn = box.right + 2, min(user.leave for user in users), box.enter - 8
    return [
        _text(x, TOP - 8, target, size=10.5, weight=700, fill=color, anchor="middle"),
        f'<path d="M{x:g} {TOP:g}V{top:g}" stroke="{GUIDE}" stroke-width="2"/>',
        f'<path d="M{x:g} {top:g}V{turn:g}q0 8 -8 8H{tip + 7:g}" stroke="{color}" stroke-width="2" fill="none"/>',
        f'<path d="M{tip:g} {box.enter:g}l9 -4.5v9z" fill="{color}"/>',
        *(f'<circle cx="{x:g}" cy="{user.leave:g}" r="4.5" fill="{color}"/>' for user in users),
    ]


def _package(package: str, box: Box, color: str) -> list[str]:
    """Return the box of a package: name, subpackages, and purpose."""
    folder = ROOT / package
    inside = sorted(path.parent.name for path in folder.glob("*/__init__.py")) if package in PACKAGES else []
    name = f"{package}/" if package in PACKAGES else f"{package}.py" if package != PUBLIC else "__init__.py"
    lines = [
        f'<rect x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}" rx="6" fill="{FILL}" '
        f'stroke="{EDGE}"/>',
        f'<rect x="{box.x:g}" y="{box.y:g}" width="6" height="{box.height:g}" rx="3" fill="{color}"/>',
        _text(box.x + 18, box.y + 22, name, size=16, weight=700),
    ]
    x = box.x + CHIPS
    for chip in inside:
        width = 7 * len(chip) + 24
        lines += [
            f'<rect x="{x:g}" y="{box.y + 8:g}" width="{width:g}" height="19" rx="9.5" fill="{CHIP}"/>',
            _text(x + width / 2, box.y + 22, f"{chip}/", size=12.5, anchor="middle"),
        ]
        x += width + 8
    for index, line in enumerate(textwrap.wrap(purpose(package), int((box.width - 30) / 6.4))):
        lines.append(_text(box.x + 18, box.y + 42 + 16 * index, line, size=13, fill=MUTED))
    return lines


def _text(
    x: float, y: float, text: str, *, size: float, weight: int = 400, fill: str = INK, anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" font-weight="{weight}" fill="{fill}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


if __name__ == "__main__":
    IMAGE.write_text(draw())
