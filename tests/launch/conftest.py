import contextlib
import os
import signal

import pytest
from helpers.launch_machines import set_up


@pytest.fixture
def machines(tmp_path):
    made = set_up(tmp_path)
    yield made
    for left in made.fake.glob("worker-*/mlmoe/run.pid"):  # processes left by failed tests
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(left.read_text()), signal.SIGKILL)
