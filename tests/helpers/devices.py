"""Python in separate processes, on simulated devices."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

# Most of the time of a test goes into compiling tiny models. Unoptimized, they compile in half of it; with the older
# emitters of fusions, which JAX 0.10 is the last to have, again in half.
UNOPTIMIZED = "--xla_backend_optimization_level=0"
if version("jaxlib").startswith("0.10."):
    UNOPTIMIZED += " --xla_cpu_use_fusion_emitters=false"


def environment_of(devices: int = 1, **variables: str) -> dict[str, str]:
    """Return this process's environment for another with the given number of CPU devices and the same imports.

    Its programs are compiled without optimization, which would take most of the time.
    """
    flags = f"--xla_force_host_platform_device_count={devices} {UNOPTIMIZED}"
    path = os.pathsep.join(sys.path)
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path} | variables


def run_python(code: str | Path, *arguments: str, devices: int = 1) -> str:
    """Run a program, or a file that holds one; return its output, and fail if it fails."""
    program = [str(code)] if isinstance(code, Path) else ["-c", code]
    command = [sys.executable, *program, *map(str, arguments)]
    done = subprocess.run(command, env=environment_of(devices), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
