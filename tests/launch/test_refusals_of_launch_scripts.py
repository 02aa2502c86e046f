"""Commands that the scripts refuse in one sentence, before they change anything, and what they say if a tool fails."""

import pytest

SLICE = "--name=my-slice --zone=us-west4-a"
GKE = "--name=a --image=us-docker.pkg.dev/my-project/my-repository/mlmoe:1"
TPU_VM_MISTAKES = [
    ("", "no action is given; choose from: up sync"),
    ("fly", 'has no action "fly"'),
    ("up --zone=us-west4-a", "--name is missing"),
    ("up --name=a", "--zone is missing"),
    ("up --name=My_Slice --zone=us-west4-a", "--name=My_Slice is not valid"),
    (f"up {SLICE}", "--type is missing"),
    (f"up {SLICE} --type=v9x-8", "there is no default image for --type=v9x-8"),
    (f"up {SLICE} --type=big", "--type=big is not valid"),
    ("up --name=a --zone=earth", "--zone=earth is not valid"),
    (f"up {SLICE} --project='a b'", "--project=a b is not"),
    (f"logs {SLICE} --worker=first", "--worker=first is not"),
    (f"run {SLICE} --restarts=-1 -- --config=a", "--restarts=-1 is not"),
    (f"up {SLICE} --colour=red", "has no flag --colour"),
    (f"up {SLICE} --fast", "has no flag --fast"),
    ("up --name --zone=us-west4-a", "--name has no value"),
    ("up --name= --zone=us-west4-a", "--name has no value"),
    (f"run {SLICE}", "run needs the flags of mlmoe_jax.main"),
]
GKE_MISTAKES = [
    (f"render --name={41 * 'a'}", "is not valid"),
    (f"render {GKE} --topology=4x4 -- --config=a", "--tpu is missing"),
    (f"run {GKE} --tpu=v5e -- --config=a", "--topology is missing"),
    (f"render {GKE} --tpu=v9 --topology=4x4 -- --config=a", "--tpu=v9 is not one of v4, v5e, v5p, v6e"),
    (f"render {GKE} --tpu=v5e --topology=4x4x4 -- --config=a", "for example, write 4x4"),
    (f"render {GKE} --tpu=v4 --topology=4x4 -- --config=a", "for example, write 4x4x4"),
    (f"run {GKE} --tpu=v5e --topology=3x3 -- --config=a", "is a multiple of 4"),
    (f"render {GKE} --tpu=v5e --topology=0x4 -- --config=a", "is a multiple of 4"),
    ("run --name=a --tpu=v5e --topology=4x4 -- --config=a", "--image is missing"),
    (f"run {GKE} --tpu=v5e --topology=4x4", "needs the flags of mlmoe_jax.main"),
    (f"run {GKE} --tpu=v5e --topology=4x4 -- $'a\\nb'", "a line break"),
    ("image --name=a --image='a b'", "--image=a b is not"),
    ("pool --name=a --tpu=v5e --topology=4x4 --location=us-west4-a", "--cluster is missing"),
    ("pool --name=a --tpu=v5e --topology=4x4 --cluster=c --location=home", "--location=home is not"),
    ("down --name=a", "nothing was deleted"),
]
MISTAKES = [
    *((f"bash launch/tpu_vm.sh {flags}", says) for flags, says in TPU_VM_MISTAKES),
    *((f"bash launch/gke.sh {flags}", says) for flags, says in GKE_MISTAKES),
    ("bash launch/supervise.sh --restarts=many -- true", "--restarts=many is not a number"),
    ("bash launch/supervise.sh --restarts=3", "nothing to run"),
    ("bash launch/supervise.sh --restarts=3 --", "nothing to run"),
    ("bash launch/supervise.sh --again -- true", "no flag --again"),
    ("MLMOE_HANG_SECONDS=long bash launch/supervise.sh -- true", "MLMOE_HANG_SECONDS=long is not a number"),
    ("bash launch/slurm.sbatch --config=a", "from the root of the repository"),
    ("cd launch && sbatch slurm.sbatch --config=a", "from the root of the repository"),
]
UP = f"bash launch/tpu_vm.sh up {SLICE} --type=v5litepod-16"
FAILURES = [
    (UP, "gcloud cannot describe my-slice: it went wrong", {"FAIL": " describe "}),
    (UP, "gcloud could not create my-slice", {"FAIL": " create ", "states": ""}),
    (UP, "was not created", {"CREATED": r"\tFAILED\n", "states": ""}),
    (f"bash launch/tpu_vm.sh down {SLICE} --yes", "gcloud could not delete my-slice", {"FAIL": " delete "}),
    (UP, "gcloud is not on the PATH", {"tools": False}),
    (f"bash launch/tpu_vm.sh up {SLICE} --type=v5litepod-256", "exists as a v5litepod-16", {}),
    (f"bash launch/tpu_vm.sh down {SLICE}", "nothing was deleted", {}),
]
for action, says, tool in [
    ("image", "docker could not build the image", "docker"),
    ("run --tpu=v5e --topology=4x4", "the cluster refused the JobSet", "kubectl"),
    (
        "pool --tpu=v5e --topology=4x4 --cluster=c --location=us-west4",
        "gcloud could not create the node pool",
        "gcloud",
    ),
    ("logs", "a has no output yet", "kubectl"),
    ("status", "kubectl cannot get a", "kubectl"),
    ("down --yes", "a was not deleted", "kubectl"),
]:
    command = f"bash launch/gke.sh {action} {GKE} -- --config=a"
    FAILURES += [(command, says, {"FAIL": " "}), (command, f"{tool} is not on the PATH", {"tools": False})]


@pytest.mark.parametrize(
    ("command", "says", "options"), [*((*mistake, {"states": ""}) for mistake in MISTAKES), *FAILURES]
)
def test_refusals(fresh, command, says, options):
    variables = {"states": "v5litepod-16\tREADY\n"} | options
    (fresh.fake / "states").write_text(variables.pop("states"))
    assert says in fresh.refused(command, **variables)
    if not variables:
        assert [call for call in fresh.calls("gcloud", "kubectl", "docker") if "describe" not in call] == []
