"""The scripts of this folder reproduce the stored numbers; with --all and the extra `parity` (launch/parity.sh)."""

import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from helpers.paths import PARITY

SCRIPTS = sorted(PARITY.glob("make_*.py"))
PACKAGES = ("torch", "transformers", "peft", "efficientnet_lite_pytorch", "mapie", "cleanlab")


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
def test_a_script_reproduces_the_stored_numbers(tmp_path, script):
    imported = re.findall(r"^\s*(?:import|from) (\w+)", script.read_text(), re.M)
    for package in set(PACKAGES) & set(imported):
        pytest.importorskip(package)
    shutil.copy(script, tmp_path)  # a script writes beside itself
    (tmp_path / "torch_files").mkdir()
    subprocess.run([sys.executable, script.name], cwd=tmp_path, check=True)
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
