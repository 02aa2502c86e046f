"""The environment of all tests and of the programs that they start, set before JAX and the package read it.

The cache of the user is not used. Compiled programs and rendered scenes are kept for the next test run, unless the
programs have become too large. The first process creates the folders; all others find them in the environment.
"""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from helpers.devices import UNOPTIMIZED
from helpers.paths import REPOSITORY

PROGRAMS, MOST_BYTES = REPOSITORY / ".tests-cache", 2**31

# Threads for a few rows wait longer for a core, which the other worker has too, than they compute.
for library in ("OMP", "OPENBLAS"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")
os.environ.setdefault("XLA_FLAGS", UNOPTIMIZED)
os.environ["MLMOE_OFFLINE"] = "1"  # no test, and no program that one starts, fetches weights from the network
if "MLMOE_TESTS_CACHE" not in os.environ:
    os.environ["MLMOE_TESTS_CACHE"] = tempfile.mkdtemp(prefix="mlmoe-tests-")
    atexit.register(shutil.rmtree, os.environ["MLMOE_TESTS_CACHE"], ignore_errors=True)
    os.environ["MLMOE_CACHE"] = f"{os.environ['MLMOE_TESTS_CACHE']}/made"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(PROGRAMS)
    if PROGRAMS.exists() and sum(file.stat().st_size for file in os.scandir(PROGRAMS)) > MOST_BYTES:
        shutil.rmtree(PROGRAMS)
    (PROGRAMS / "scenes").mkdir(parents=True, exist_ok=True)
    Path(os.environ["MLMOE_CACHE"]).mkdir()
    Path(os.environ["MLMOE_CACHE"], "digits-v1").symlink_to(PROGRAMS / "scenes")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
