"""The switch --optimized: programs are compiled as for users, and the differences from other packages are printed."""

import os

from helpers import twins
from helpers.devices import UNOPTIMIZED


def pytest_addoption(parser):
    parser.addoption(
        "--optimized", action="store_true", help="compile as users do, and print the differences from other packages"
    )


def pytest_configure(config):
    if config.getoption("--optimized"):
        os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace(UNOPTIMIZED, "")


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("--optimized"):
        terminalreporter.section("largest differences, relative to the largest entry of the reference")
        for test, value in sorted(twins.LARGEST.items()):
            terminalreporter.write_line(f"{value:.1e}  {test}")
