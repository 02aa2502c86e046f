import contextlib
import os
import shutil
import signal

import pytest
from helpers.launch_machines import Machines, set_up


@pytest.fixture(scope="session")
def fresh(tmp_path_factory):
    return set_up(tmp_path_factory.mktemp("machines"))


@pytest.fixture
def machines(fresh, tmp_path):
    shutil.copytree(fresh.root.parent, tmp_path, symlinks=True, dirs_exist_ok=True)
    made = Machines(tmp_path / fresh.root.name, tmp_path / fresh.fake.name)
    yield made
    for left in made.fake.glob("worker-*/mlmoe/run.pid"):  # processes left by failed tests
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(left.read_text()), signal.SIGKILL)
