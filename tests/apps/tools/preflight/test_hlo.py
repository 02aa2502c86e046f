"""The collectives in the text of a compiled program, in all forms in which compilers print them."""

import pytest

from mlmoe_jax.apps.tools.preflight.hlo import Collective, collectives, shape_bytes, totals


def program(*lines, before=""):
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule made_up\n\n{before}\nENTRY %main (a: f32[4]) -> f32[4] {{\n{body}\n}}\n"


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[]", 4),
        ("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}", 2048),
        ("pred[3]", 3),
        ("s4[3]{0:T(1024)E(4)}", 2),
        ("f8e4m3fn[2,2]", 4),
        ("f32[0,7]", 0),
        ("f32[<=8,2]", 64),
        ("(f32[2]{0}, (bf16[4]{0}, u32[]{:S(2)}), token[])", 8 + 8 + 4),
    ],
)
def test_bytes_of_a_shape(shape, size):
    assert shape_bytes(shape) == size


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("replica_groups={{0,2,4,6},{1,3,5,7}}", 4),
        ("replica_groups={}", 8),
        ("replica_groups=[2,4]<=[8]", 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_0','axis_2'}", 8),
        ("replica_groups=mesh['axis_0'=1,'axis_1'=2,'axis_2'=4], device_ids=([4,2]T(1,0)) {'axis_1'}", 2),
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(2)4}", 4),
    ],
)
def test_the_size_of_a_group_in_all_printed_forms(groups, size):
    text = program(f"%r = f32[10]{{0}} all-reduce(%a), channel_id=1, {groups}, to_apply=%add")
    assert collectives(text, 8) == [Collective("all-reduce", 40, size)]


def test_a_group_of_one_is_not_a_collective():
    assert collectives(program("%r = f32[10] all-reduce(%a), replica_groups={{0},{1}}, to_apply=%add"), 2) == []


def test_start_and_done_are_one_operation():
    text = program(
        "%s = f32[10] all-reduce-start(%a), channel_id=1, replica_groups=[1,4]<=[4], to_apply=%add",
        "%d = f32[10] all-reduce-done(%s)",
        "%g = (f32[3]{0}, f32[12]{0}) all-gather-start(%d), channel_id=2, replica_groups=[1,4]<=[4], dimensions={0}",
        "%h = f32[12] all-gather-done((f32[3]{0}, f32[12]{0}) %g)",
        "%p = (f32[5], f32[5], u32[], u32[]) collective-permute-start(%h), channel_id=3, source_target_pairs={{0,1}}",
        "%q = f32[5] collective-permute-done(%p)",
        "%w = ((f32[8]), f32[2], u32[]) async-start(%q), calls=%wrapped",
        "ROOT %z = f32[2] async-done(%w)",
        before="%wrapped (b: f32[8]) -> f32[2] {\n  %b = f32[8] parameter(0)\n"
        "  ROOT %c = f32[2] reduce-scatter(%b), channel_id=4, replica_groups=[1,4]<=[4], to_apply=%add\n}\n",
    )
    sizes = {"reduce-scatter": 32, "all-reduce": 40, "all-gather": 48, "collective-permute": 20}
    assert collectives(text, 4) == [Collective(kind, size, 4) for kind, size in sizes.items()]


def test_fusions_of_the_tpu_compiler():
    """The pieces of one collective count once, and an all-reduce of which a slice is used is a reduce-scatter."""
    piece = "%g = (f32[8]{0:T(128)}, /*index=1*/f32[1]) all-gather(%b), channel_id=6, replica_groups=[1,4]<=[4]"
    before = "".join(f"%part{k} (b: f32[2]) -> f32[8] {{\n  {piece}\n}}\n" for k in range(3)) + (
        "%all-reduce-scatter.1 (b: f32[8]) -> f32[2] {\n"
        "  %r = f32[8]{0:T(128)} all-reduce(%b), channel_id=3, replica_groups={{0,1,2,3}}, to_apply=%add\n"
        "  ROOT %s = f32[2] dynamic-slice(%r), dynamic_slice_sizes={2}\n}\n"
    )
    names = ("part0", "part1", "part2", "all-reduce-scatter.1")
    text = program(
        *(f"%f{k} = f32[8] fusion(%a), kind=kCustom, calls=%{name}" for k, name in enumerate(names)), before=before
    )
    assert collectives(text, 4) == [Collective("all-gather", 36, 4), Collective("reduce-scatter", 32, 4)]


def test_totals_and_bytes_on_the_wire():
    rows = [
        Collective("all-reduce", 100, 4),
        Collective("all-gather", 100, 4),
        Collective("collective-permute", 100, 4),
        Collective("all-reduce", 8, 2),
    ]
    assert totals(rows) == {
        "all-gather": {"count": 1, "bytes": 100, "wire_bytes": 75.0},
        "all-reduce": {"count": 2, "bytes": 108, "wire_bytes": 2 * 75.0 + 8.0},
        "collective-permute": {"count": 1, "bytes": 100, "wire_bytes": 100.0},
    }
