import contextlib
import os
import shutil
import signal

import pytest
from helpers.launch_machines import Machines, set_up


@pytest.fixture(scope="session")
def fresh(tmp_path_factory):
    """The scripts and the tools, set up once, for commands that change nothing."""
    return set_up(tmp_path_factory.mktemp("machines"))


@pytest.fixture
def machines(fresh, tmp_path):
    """A copy for commands that change it."""
    for name in ("calls", "states"):  # of the last command
        (fresh.fake / name).unlink(missing_ok=True)
    shutil.copytree(fresh.root.parent, tmp_path, symlinks=True, dirs_exist_ok=True)
    made = Machines(tmp_path / fresh.root.name, tmp_path / fresh.fake.name)
    yield made
    for left in made.fake.glob("worker-*/mlmoe/run.pid"):  # processes left by failed tests
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(left.read_text()), signal.SIGKILL)
