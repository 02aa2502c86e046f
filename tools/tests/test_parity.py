"""`python -m tools.parity` reproduces the stored numbers, with the extra `parity` (launch/parity.sh)."""

import re
import subprocess
import sys

import numpy as np
import pytest
from helpers.paths import PARITY, REPOSITORY

from tools.parity.__main__ import NAMES

PACKAGES = ("torch", "transformers", "peft", "efficientnet_lite_pytorch", "mapie", "cleanlab")


@pytest.mark.parametrize("name", sorted({*NAMES} - {"foundation_models"}))
def test_the_stored_numbers_are_reproduced(tmp_path, name):
    text = (REPOSITORY / "tools" / "parity" / f"{name}.py").read_text()
    imported = re.findall(r"^\s*(?:import|from) (\w+)", text, re.M)
    for package in set(PACKAGES) & set(imported):
        pytest.importorskip(package)
    command = [sys.executable, "-m", "tools.parity", name, f"--out={tmp_path}"]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    files = sorted(tmp_path.rglob("*.npz"))
    assert files
    for file in files:
        made, stored = np.load(file), np.load(PARITY / file.relative_to(tmp_path))
        assert set(made) == set(stored), file.name
        for key, kept in stored.items():
            if not np.issubdtype(kept.dtype, np.floating):
                np.testing.assert_array_equal(made[key], kept, err_msg=key)
                continue
            kept = kept.astype(np.float64)
            limit = 1e-5 * np.abs(kept).max(initial=0)
            np.testing.assert_allclose(made[key].astype(np.float64), kept, rtol=1e-4, atol=limit, err_msg=key)
