"""The same numbers on every mesh: eight simulated devices, in a process of its own, compared with one of them."""

import json

import pytest
from helpers.devices import run_python

MESHES = [(8, 1, 1), (4, 1, 2), (2, 2, 2), (1, 1, 8)]
REFERENCES = ["mlvpt_digits", "drmoe_resnet101:dataset=digits", "mlmoe_dinov2:dataset=digits"]
QUICK = {  # not marked as slow, in one process
    "differences": ("mlvpt_digits", [(1, 2, 4)], 2),
    "bank_forms": (16, (2, 1, 4)),
}


def on_eight_devices(function: str, *arguments):
    """Call a function of mesh_programs.py in a new process with eight devices; return its result."""
    return all_on_eight_devices((function, *arguments))[0]


def all_on_eight_devices(*calls: tuple) -> list:
    """Make several such calls in one process."""
    code = (
        "import sys, json\nfrom training import mesh_programs\n"
        "calls = json.loads(sys.argv[1])\n"
        "print(json.dumps([getattr(mesh_programs, function)(*arguments) for function, *arguments in calls]))"
    )
    return json.loads(run_python(code, json.dumps(calls), devices=8).splitlines()[-1])


@pytest.fixture(scope="module")
def quick():
    """The results of the functions in QUICK, by name."""
    return dict(zip(QUICK, all_on_eight_devices(*((name, *given) for name, given in QUICK.items())), strict=True))


def require_equal_to_one_device(found: dict, meshes: list) -> None:
    assert len(found) == len(meshes)
    for sizes, gaps in found.items():
        assert max(gaps["logits"], gaps["metrics"], gaps["values"]) < 1e-5, (sizes, gaps)
        assert bool(gaps["sharded"]) == (not sizes.endswith(" 1)")), "labels are sharded over `expert`"


def test_loss_gradients_and_scores_are_those_of_one_device(quick):
    require_equal_to_one_device(quick["differences"], QUICK["differences"][1])


@pytest.mark.slow
def test_the_importance_of_masks_is_that_of_one_device():
    """Pruning measures it on the mesh of the training, where ten labels are padded."""
    found = on_eight_devices("importance_gaps", [(1, 1, 8), (2, 1, 4)])
    assert {sizes: seen["padded"] for sizes, seen in found.items()} == {"(1, 1, 8)": 6, "(2, 1, 4)": 2}
    for sizes, seen in found.items():
        assert seen["gap"] < 1e-5, sizes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference", "meshes", "accumulate"),
    [
        ("drmoe_resnet101:dataset=digits", [(1, 1, 8)], 2),
        *((reference, MESHES, 1) for reference in REFERENCES),
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
def test_batch_norm_has_the_statistics_of_the_global_batch():
    found = on_eight_devices("batch_norm_gaps", [(8, 1, 1), (4, 2, 1)])
    assert found["moved"] > 1e-3
    assert len(found["gaps"]) == 2
    assert max(found["gaps"].values()) <= 1e-5, found


@pytest.mark.slow
def test_a_damaged_checkpoint_of_sharded_arrays_is_skipped_with_one_line(tmp_path):
    found = on_eight_devices("after_damage", str(tmp_path))
    assert found["step"] == 1
    (line,) = found["lines"]
    assert line.startswith("checkpoint 2 is damaged and was skipped: ")


@pytest.mark.slow
@pytest.mark.parametrize("reference", REFERENCES)
def test_a_checkpoint_of_any_mesh_restores_on_any_other(reference, tmp_path):
    pairs = [((1, 1, 8), (2, 2, 2)), ((2, 2, 2), (1, 1, 8)), ((8, 1, 1), (4, 1, 2))]
    for number, (saved_on, restored_on) in enumerate(pairs):
        assert on_eight_devices("restored", reference, saved_on, restored_on, str(tmp_path / str(number)))


@pytest.mark.slow
def test_the_flops_of_the_backbone_per_device_are_the_same_on_every_mesh():
    flops = on_eight_devices("backbone_flops", "mlvpt_digits", MESHES)
    assert max(flops) == pytest.approx(min(flops), rel=1e-3)


@pytest.mark.parametrize("labels", [16, pytest.param(10, marks=pytest.mark.slow)])
def test_task_experts_equal_those_of_one_device(quick, labels):
    """16 labels divide over four devices along `expert`, without communication; 10 do not divide."""
    found = quick["bank_forms"] if labels == 16 else on_eight_devices("bank_forms", labels, (2, 1, 4))
    assert found["gap"] < 1e-6
    assert not found["collectives"]


@pytest.mark.slow
def test_sharded_labels_communicate_only_tokens_logits_and_shared_gradients():
    """Tokens, labels and masks are gathered, and logits; not gradients of parameters per label, and not f32[B,K,D].

    Gradients are summed for shared parameters, and in both layers for keys and values, which have the tokens' size.
    """
    seen = on_eight_devices("label_traffic", "drmoe_20k:dataset=digits", 960)
    assert seen["tokens"] <= seen["moved"] <= seen["tokens"] + 4 * seen["label"] < seen["activations"] / 10
    assert seen["shared"] / 2 < seen["summed"] <= seen["shared"] + 4 * seen["tokens"] < seen["owned"]
