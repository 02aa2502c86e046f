"""Which tests run: with --all every one, otherwise those that are not slow. The longest files come first."""

import pytest

_PARAM = type(pytest.param())


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also run the tests marked slow, and those of tools/")


def pytest_collection_modifyitems(config, items):
    """Leave slow tests out without --all; they are deselected, since skipped tests are those that cannot run here.

    The longest files come first, so that no worker waits for one of them at the end.
    """
    items.sort(key=lambda item: not item.nodeid.startswith("tests/training/"))
    if not config.getoption("--all"):
        kept, slow = [], []
        for item in items:
            (slow if is_slow(item) else kept).append(item)
        config.hook.pytest_deselected(items=slow)
        items[:] = kept


def is_slow(item: pytest.Item) -> bool:
    """Return whether a test runs only with --all, by its place or one of the markers `slow` and `variants`."""

    def varies(mark: pytest.Mark) -> bool:
        params = item.callspec.params
        if unknown := {*mark.args, *mark.kwargs} - params.keys():
            raise pytest.UsageError(f"{item.nodeid} has no argument {unknown.pop()}, which its marker variants names")
        others = any(params[name] not in values for name, values in mark.kwargs.items())
        return others or not all(has_first_value(item, name) for name in mark.args)

    of_tools = item.nodeid.startswith("tools/")
    return of_tools or "slow" in item.keywords or any(map(varies, item.iter_markers("variants")))


def has_first_value(item: pytest.Item, name: str) -> bool:
    """Return whether an argument of a test has the first value that its `parametrize` or its fixture gives."""
    for mark in item.iter_markers("parametrize"):
        names, values = mark.args
        names = [one.strip() for one in names.split(",")] if isinstance(names, str) else [*names]
        if name in names:
            first = next(iter(values))
            row = first.values if isinstance(first, _PARAM) else first if len(names) > 1 else [first]
            return item.callspec.params[name] is row[names.index(name)]
    return item.callspec.indices[name] == 0  # a fixture; of arguments, pytest counts combinations
