"""A copy of the launch scripts with fake versions of the tools that they call, which record their arguments."""

import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from helpers.commands import refused
from helpers.paths import REPOSITORY

PAGE = REPOSITORY / "docs" / "scaling.md"
DRY_RUNS = REPOSITORY / "tests" / "launch" / "dry_runs.md"

RECORD = """#!/usr/bin/env bash
{ printf '%s\\x1f' "${0##*/}" "$@"; printf '\\x1e'; } >> "$FAKE/calls"
if [ -n "${FAIL:-}" ] && [[ "$*" == *$FAIL* ]]; then echo "it went wrong" >&2; exit 7; fi
"""

# Cloud TPU: a slice of two workers, which are two folders. Each line of `states` answers one call; the last one stays.
GCLOUD = """
value() { local word; for word in "${@:2}"; do case "$word" in "--$1="*) echo "${word#*=}" ;; esac; done; }
case "$4" in
  describe)
    [ -s "$FAKE/states" ] || { echo "ERROR: (gcloud) NOT_FOUND: no such resource" >&2; exit 1; }
    head -n 1 "$FAKE/states"
    [ "$(wc -l < "$FAKE/states")" -eq 1 ] || sed -i 1d "$FAKE/states" ;;
  create) printf '%b' "${CREATED:-\\tREADY\\n}" > "$FAKE/states" ;;
  start) printf '\\tREADY\\n' > "$FAKE/states" ;;
  delete) rm "$FAKE/states" ;;
  scp) for home in "$FAKE"/worker-*; do cp "$5" "$home/${6#*:}"; done ;;
  ssh)
    code=0 worker="$(value worker "$@")"
    for home in "$FAKE"/worker-${worker/all/*}; do
      (cd "$home" && HOME="$home" bash -c "$(value command "$@")") || { last=$?; [ $code -ne 0 ] || code=$last; }
    done
    exit $code ;;
esac
"""

PYTHON = """
case "$1" in
  --version) echo "Python 3.12.99" ;;
  -c) ;;
  -) echo some-package ;;
  -m)
    case "$2" in
      venv) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
      mlmoe_jax.main) exec bash "$FAKE/train" ;;
    esac ;;
esac
"""

UV = """
case "$*" in "python find "*) echo "$FAKE/bin/python3.12" ;; esac
"""

KUBECTL = """
case " $* " in *" --filename=- "*) cat > "$FAKE/manifest" ;; esac
"""

# Slurm runs a copy of the script, with the submit folder and the CPUs per task that its lines request.
SBATCH = """
while [[ "$1" == --* ]]; do shift; done
cp "$1" "$FAKE/slurm_script"
export SLURM_JOB_ID=7 SLURM_SUBMIT_DIR="$PWD"
export SLURM_CPUS_PER_TASK="$(sed -n 's/^#SBATCH --cpus-per-task=//p' "$1")"
shift
cd "$FAKE" && exec bash slurm_script "$@"
"""

SRUN = """
while [[ "$1" == --* ]]; do shift; done
exec "$@"
"""

SQUEUE = """
echo "${JOB_STATE:-RUNNING}"
"""

TOOLS = {
    "gcloud": GCLOUD,
    "python3.12": PYTHON,
    "uv": UV,
    "kubectl": KUBECTL,
    "docker": "",
    "sbatch": SBATCH,
    "srun": SRUN,
    "squeue": SQUEUE,
    "scontrol": "",
}


@dataclass
class Machines:
    """The copy of the repository in `root`, the tools in `fake/bin`, the home folders of the workers in `fake`."""

    root: Path
    fake: Path

    def __call__(self, command: str, *, tools: bool = True, **variables: str) -> subprocess.CompletedProcess:
        """Run a shell command in the copy, with the tools on the path or without."""
        (self.fake / "calls").write_text("")
        path = f"{self.fake / 'bin'}:{os.environ['PATH']}" if tools else str(self.fake / "system")
        environment = {
            "PATH": path,
            "HOME": str(self.fake),
            "FAKE": str(self.fake),
            "PYTHON": str(self.fake / "bin" / "python3.12"),
            "MLMOE_POLL": "0",
            "MLMOE_RESTART_PAUSE": "0",
        }
        return subprocess.run(
            [shutil.which("bash"), "-c", command],
            env=environment | variables,
            cwd=self.root,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
        )

    def calls(self, *tools: str) -> list[list[str]]:
        """Return the calls of these tools by the last command, each as the name of the tool and its arguments."""
        every = [call.split("\x1f")[:-1] for call in (self.fake / "calls").read_text().split("\x1e")[:-1]]
        return [call for call in every if call[0] in tools]

    def train(self, script: str) -> None:
        """Replace the program by this shell script."""
        (self.fake / "train").write_text(script)

    def refused(self, command: str, **options) -> str:
        """Run a command, assert exit code 2 and one sentence, and return the sentence."""
        done = self(command, **options)
        assert done.stderr.splitlines()[-1:] == [refused(done)], "the last line"
        return refused(done).removeprefix("error: ")


def set_up(folder: Path) -> Machines:
    """Create the copy and the tools in a folder."""
    root, fake = folder / "code", folder / "fake"
    for name in ("launch", "locks"):
        shutil.copytree(REPOSITORY / name, root / name)
    for name in ("requirements.txt", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, root / name)
    subprocess.run(["git", "init", "--quiet", "--template=", root], check=True)
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    for name in ("bin", "system", "worker-0", "worker-1"):
        (fake / name).mkdir(parents=True)
    for name, script in TOOLS.items():
        (fake / "bin" / name).write_text(RECORD + script)
        (fake / "bin" / name).chmod(0o755)
    for name in ("bash", "dirname", "sed"):  # a machine without the tools of a cloud or a cluster
        (fake / "system" / name).symlink_to(shutil.which(name))
    made = Machines(root, fake)
    made.train("echo trained")
    return made


def dry_runs() -> list[tuple[str, list[str]]]:
    """Return the commands with --dry-run, each with the lines that it should print."""
    blocks = re.findall(r"^```(?:bash|text)\n(.*?)^```$", DRY_RUNS.read_text(), flags=re.S | re.M)
    return [(command, printed.splitlines()) for command, printed in zip(blocks[::2], blocks[1::2], strict=True)]


def words(lines: list[str], *tools: str) -> list[list[str]]:
    """Return the lines that call these tools, split as by a shell."""
    return [shlex.split(line) for line in lines if line.split()[0] in tools]
