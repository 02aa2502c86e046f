"""Python in separate processes, on simulated devices."""

import os
import subprocess
import sys
from pathlib import Path


def environment_of(devices: int = 1, **variables: str) -> dict[str, str]:
    """Return this process's environment for another with the given number of CPU devices and the same imports.

    Its programs are compiled without optimization, which would take most of the time.
    """
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    path = os.pathsep.join(sys.path)
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path} | variables


def start_python(code: str | Path, *arguments: str, devices: int = 1, **options) -> subprocess.Popen:
    """Start Python with a program, or with a file that holds one; options: of Popen."""
    program = [str(code)] if isinstance(code, Path) else ["-c", code]
    command = [sys.executable, *program, *map(str, arguments)]
    return subprocess.Popen(command, env=environment_of(devices), text=True, **options)


def run_python(code: str | Path, *arguments: str, devices: int = 1) -> str:
    """Run a program as `start_python` does; return its output, and fail if it fails."""
    process = start_python(code, *arguments, devices=devices, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err[-3000:]
    return out
