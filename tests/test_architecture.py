"""The packages of mlmoe_jax: what they are for, what they may use, and how large their parts are."""

import ast
import gc
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from helpers.paths import REPOSITORY

from tools.docs import draw_architecture as drawing
from tools.docs.source import parse_source

ROOT, PACKAGES, LAYER_OF, PUBLIC = drawing.ROOT, drawing.PACKAGES, drawing.LAYER_OF, drawing.PUBLIC
PAGE = (REPOSITORY / "docs" / "architecture.md").read_text()

MOST_IN_FUNCTION, MOST_FIELDS = 60, 11
TABLES: set[str] = set()  # functions that are one long table
TABLE = "config.table"
CONFIGURATIONS = {"models.backbones.vit.ViTShape"}  # classes whose fields are settings


@pytest.fixture(scope="module")
def imports():
    return drawing.read_imports()


@pytest.fixture(scope="module")
def trees():
    return {name: parse_source(path.read_text()) for name, path in drawing.modules().items()}


def cycle(uses: Iterable[tuple[str, str]]) -> list[str]:
    """A cycle among (user, used) pairs, empty if there is none."""
    graph = defaultdict(set)
    for user, used in uses:
        graph[user].add(used)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_our_sources_are_parsed_although_a_finalizer_parses_too():
    """CPython up to 3.11.7 fails, and a finalizer that fails parses the lines of its traceback."""
    before = gc.get_threshold()
    gc.callbacks.append(parse := lambda *_: ast.parse("a + b"))
    gc.set_threshold(1)
    try:
        assert len(parse_source("[" + "f(a), " * 100 + "]").body[0].value.elts) == 100
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(parse)


def test_all_tests_and_tools_parse_so():
    for folder in ("tools", "tests"):
        for path in {*(REPOSITORY / folder).rglob("*.py")} - {Path(__file__), Path(parse_source.__code__.co_filename)}:
            assert "ast.parse(" not in path.read_text(), f"{path}: use parse_source"


# ----------------------------------------------------------------------------------------------------------- imports
def test_every_package_is_in_a_layer():
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders == set(PACKAGES)
    files = {path.stem for path in ROOT.glob("*.py")} - {"__init__"}
    assert files == {package for packages in drawing.LAYERS for package in packages} - set(PACKAGES) - {PUBLIC}


def test_no_package_uses_a_package_above_it_or_beside_it(imports):
    """The table of the config names declarations of keys above it, which it does not depend on."""
    others = [one for one in imports if not (one.source == TABLE and one.when == drawing.NAMED)]
    packages = ((one, drawing.package_of(one.source), drawing.package_of(one.target)) for one in others)
    wrong = [str(one) for one, user, used in packages if user != used and not LAYER_OF[user] < LAYER_OF[used]]
    assert not wrong, "\n".join(wrong)


def test_declarations_of_keys_import_only_keys_and_other_declarations(imports):
    """Help and the table read them, wherever they stand, without what computes."""
    declared = {one.target for one in imports if one.source == TABLE and one.when == drawing.NAMED}
    assert len(declared) > 5
    used = {one.target for one in imports if one.source in declared and one.when == "at once"}
    assert {name for name in used if not name.endswith(("_keys", "catalog"))} <= {"runtime.keys", "runtime.registry"}


def test_every_import_inside_the_package_is_absolute(trees):
    """Relative ones would not be seen by the other tests."""
    nodes = ((name, node) for name, tree in trees.items() for node in ast.walk(tree))
    assert not [name for name, node in nodes if isinstance(node, ast.ImportFrom) and node.level]


def test_programs_beside_the_package_import_modules_that_exist():
    """Also imports inside functions, which nothing else resolves."""
    missing = []
    for folder in ("benchmarks", "tools", "tests", "mlmoe_jax"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            for module in re.findall(r"^\s*from (mlmoe_jax[\w.]*) import ", path.read_text(), re.MULTILINE):
                place = REPOSITORY / module.replace(".", "/")
                if not (place.with_suffix(".py").exists() or place.is_dir()):
                    missing.append(f"{path} {module}")
    assert not missing, missing


def test_files_of_tests_have_different_names():
    paths = sorted((REPOSITORY / "tests").rglob("test_*.py"), key=lambda path: path.name)
    pairs = [pair for pair in itertools.pairwise(paths) if pair[0].name == pair[1].name]
    assert not pairs, "pytest imports them as modules without a package, of which it finds one"


def test_no_modules_import_one_another(imports):
    """Also inside functions and for types only: two such modules are one, which a reader must read together."""
    assert not cycle((one.source, one.target) for one in imports if one.when != drawing.NAMED)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_parts_of_a_package_do_not_use_one_another_in_a_cycle(package, imports):
    """The parts are its modules and its subpackages, each as a whole; imports inside functions count.

    A table of names may name a module that uses it: that is what such tables are for.
    """

    used = ((one.source.split("."), one.target.split(".")) for one in imports if one.when != drawing.NAMED)
    inside = ((user[:2], part[:2]) for user, part in used if user[0] == part[0] == package)
    assert not cycle((".".join(user), ".".join(part)) for user, part in inside if user != part)


def test_imports_are_found_wherever_they_stand(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "__init__.py").write_text("")
    (tmp_path / "data" / "batch.py").write_text("import mlmoe_jax.errors\n")
    (tmp_path / "errors.py").write_text('TABLE = {"batch": "mlmoe_jax.data.batch:Batch"}\n')
    (tmp_path / "main.py").write_text(
        "import os\nfrom mlmoe_jax import data\n\ndef main():\n    from mlmoe_jax.data.batch import Batch\n"
        "if TYPE_CHECKING:\n    from mlmoe_jax.errors import UserError\n"
    )
    found = {(one.source, one.target, one.line, one.when) for one in drawing.read_imports(tmp_path)}
    assert found == {
        ("data.batch", "errors", 1, "at once"),
        ("errors", "data.batch", 1, "named"),
        ("main", "data", 2, "at once"),
        ("main", "data.batch", 5, "later"),
        ("main", "errors", 7, "later"),
    }
    assert cycle([("a", "b"), ("b", "c"), ("c", "a")])
    assert not cycle([("a", "b"), ("b", "c"), ("a", "c")])


# --------------------------------------------------------------------------------------------------------- sentences
@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_in_one_sentence_what_it_is_for_and_what_it_may_use(package):
    purpose, may, used = drawing.sentence(package).partition("; may use")
    assert may + used == drawing.may_use(package), "this is how the docstring should end"
    assert len(purpose) > 20
    assert "\n" not in purpose
    assert ". " not in purpose


# ------------------------------------------------------------------------------------------------------------- sizes
def sizes(trees: dict[str, ast.Module], kinds: type, size: Callable[[ast.AST], int]) -> dict[str, int]:
    """Return the size of each function or class by its name."""
    nodes = ((name, node) for name, tree in trees.items() for node in ast.walk(tree) if isinstance(node, kinds))
    return {f"{name}.{node.name}": size(node) for name, node in nodes}


def test_no_function_is_long(trees):
    lines = sizes(trees, ast.FunctionDef | ast.AsyncFunctionDef, lambda node: node.end_lineno - node.lineno + 1)
    assert {name for name, count in lines.items() if count > MOST_IN_FUNCTION} == TABLES


def test_no_class_has_many_fields(trees):
    fields = sizes(trees, ast.ClassDef, lambda node: sum(isinstance(line, ast.AnnAssign) for line in node.body))
    assert {name for name, count in fields.items() if count > MOST_FIELDS} == CONFIGURATIONS


# -------------------------------------------------------------------------------------------- what only apps may do
EXIT_CODES = {"DONE", "FOUND_PROBLEMS", "USER_ERROR", "OUTDATED", "DISK_ERROR", "INTERRUPTED"}
PROGRAMS = {"data.sources.digits"}  # `python -m` programs, which print what they have made
# State of the whole process, which only the command line may change.
STATE = {"sys.unraisablehook", "sys.excepthook", "sys.stdout", "sys.stderr", "warnings.showwarning"}
CHANGES = {"addFilter", "removeFilter", "dup2", "execv"}


def below_apps(trees: dict[str, ast.Module]) -> Iterable[tuple[str, ast.Module]]:
    rest = ((name, tree) for name, tree in trees.items() if drawing.package_of(name) not in ("apps", "main", "errors"))
    return ((name, tree) for name, tree in rest if name not in PROGRAMS)


def test_only_apps_print_and_know_exit_codes(trees):
    wrong = []
    for name, tree in below_apps(trees):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.exit", "exit"):
                wrong.append(f"{name}:{node.lineno} {ast.unparse(node)[:60]}")
            elif isinstance(node, ast.arg) and node.arg == "as_json":
                wrong.append(f"{name}:{node.lineno} as_json")
            elif isinstance(node, ast.ImportFrom) and node.module == "mlmoe_jax.errors":
                wrong += [f"{name} {one.name}" for one in node.names if one.name in EXIT_CODES]
    assert not wrong, "\n".join(wrong)


def changes_of(tree: ast.Module) -> list[str]:
    """Return what a module changes for the whole process."""
    targets = [target for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets]
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls = [call for call in calls if isinstance(call, ast.Attribute) and call.attr in CHANGES]
    parts = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [ast.unparse(part) for part in parts if ast.unparse(part) in STATE] + [ast.unparse(call) for call in calls]


def test_only_the_command_line_changes_the_whole_process(trees):
    changing = {name: changes for name, tree in trees.items() if (changes := changes_of(tree))}
    assert changing.keys() == {"apps.cli.process", "apps.cli.environment"}, changing
    every_kind = parse_source("sys.stdout, x = f, g\nwarnings.showwarning = f\nlog.addFilter(f)\nos.dup2(1, 2)")
    assert changes_of(every_kind) == ["sys.stdout", "warnings.showwarning", "log.addFilter", "os.dup2"]


# --------------------------------------------------------------------------------------------------- image and page
def test_the_image_is_up_to_date():
    assert drawing.IMAGE.read_text() == drawing.draw(), "run: python -m tools.docs.draw_architecture"


def test_the_table_of_packages_is_that_of_the_code():
    rows = dict(re.findall(r"^\| \[`(\w+)/`\]\(\.\./mlmoe_jax/\w+\) \| (.*) \|$", PAGE, re.MULTILINE))
    assert list(rows) == list(PACKAGES)
    for package, row in rows.items():
        below = drawing.LAYERS[LAYER_OF[package] + 1]
        _, uses, main = (cell.strip() for cell in row.split(" | "))
        assert uses == ("—" if below == drawing.LAYERS[-1] else ", ".join(f"`{name}`" for name in below))
        for name in re.findall(r"`([\w./]+)`", main):
            assert (ROOT / package / name).exists(), f"{package}/{name}"


def test_every_requirement_has_its_use_above_it():
    lines = (REPOSITORY / "requirements.txt").read_text().splitlines()
    unexplained = [
        line for above, line in itertools.pairwise(lines) if not (line.startswith("#") or above.startswith("#"))
    ]
    assert unexplained == []
