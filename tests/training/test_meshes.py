"""The same numbers on every mesh: eight simulated devices, in a process of its own, compared with one of them."""

import json

import pytest
from helpers.devices import run_python

MESHES = [(8, 1, 1), (4, 1, 2), (2, 2, 2), (1, 1, 8)]
DR_MOE = "drmoe_resnet101:dataset=digits"
REFERENCES = ["mlvpt_digits", DR_MOE, "mlmoe_dinov2:dataset=digits"]
BATCH_NORM = "finetune:dataset=digits,backbone=resnet101"  # its statistics are those of the global batch


def on_eight_devices(function: str, *arguments):
    """Call a function of mesh_programs.py in a new process with eight devices; return its result."""
    code = (
        "import sys, json\nfrom training import mesh_programs\nfunction, *arguments = json.loads(sys.argv[1])\n"
        "print(json.dumps(getattr(mesh_programs, function)(*arguments)))"
    )
    return json.loads(run_python(code, json.dumps([function, *arguments]), devices=8).splitlines()[-1])


def require_equal_to_one_device(found: dict, meshes: list) -> None:
    assert len(found) == len(meshes)
    for sizes, gaps in found.items():
        assert max(gaps["logits"], gaps["metrics"], gaps["values"]) < 1e-5, (sizes, gaps)
        assert bool(gaps["sharded"]) == (not sizes.endswith(" 1)")), "labels are sharded over `expert`"


@pytest.mark.slow
def test_the_importance_of_masks_is_that_of_one_device():
    """Pruning measures it on the mesh of the training, where ten labels are padded."""
    found = on_eight_devices("importance_gaps", [(1, 1, 8), (2, 1, 4)])
    assert {sizes: seen["padded"] for sizes, seen in found.items()} == {"(1, 1, 8)": 6, "(2, 1, 4)": 2}
    for sizes, seen in found.items():
        assert seen["gap"] < 1e-5, sizes


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("reference", "meshes", "accumulate"),
    [
        pytest.param("mlvpt_digits", [(1, 2, 4)], 2, marks=pytest.mark.budget(20)),  # two programs of eight devices
        pytest.param(DR_MOE, [(1, 1, 8)], 2, marks=SLOW),
        pytest.param(BATCH_NORM, [(8, 1, 1), (4, 2, 1)], 1, marks=SLOW),
        *(pytest.param(reference, MESHES, 1, marks=SLOW) for reference in REFERENCES),
    ],
)
def test_all_methods_on_all_meshes_equal_one_device(reference, meshes, accumulate):
    require_equal_to_one_device(on_eight_devices("differences", reference, meshes, accumulate), meshes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["role", "ll_cp"])
def test_losses_rank_the_global_batch_and_their_values_are_sharded_by_image(kind):
    found = on_eight_devices("estimate_gaps", kind, [(8, 1, 1), (2, 4, 1), (2, 2, 2)])
    assert found["moved"] >= 45
    assert [one["sharded"] for one in found["meshes"].values()] == [False, True, True]
    assert max(one["gap"] for one in found["meshes"].values()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("reference", REFERENCES)
def test_a_checkpoint_of_any_mesh_restores_on_any_other(reference, tmp_path):
    pairs = [((1, 1, 8), (2, 2, 2)), ((2, 2, 2), (1, 1, 8)), ((8, 1, 1), (4, 1, 2))]
    for number, (saved_on, restored_on) in enumerate(pairs):
        assert on_eight_devices("restored", reference, saved_on, restored_on, str(tmp_path / str(number)))


@pytest.mark.slow
def test_sharded_labels_communicate_only_tokens_logits_and_shared_gradients():
    """Tokens, labels and masks are gathered, and logits; not gradients of parameters per label, and not f32[B,K,D].

    Gradients are summed for shared parameters, and in both layers for keys and values, which have the tokens' size.
    """
    seen = on_eight_devices("label_traffic", "drmoe_20k:dataset=digits", 960)
    assert seen["tokens"] <= seen["moved"] <= seen["tokens"] + 4 * seen["label"] < seen["activations"] / 10
    assert seen["shared"] / 2 < seen["summed"] <= seen["shared"] + 4 * seen["tokens"] < seen["owned"]
