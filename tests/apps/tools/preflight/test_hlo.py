import jax
import jax.numpy as jnp
import pytest

from mlmoe_jax.apps.tools.preflight import hlo
from mlmoe_jax.apps.tools.preflight.hlo import Collective, collectives, shape_bytes, totals

ADD = """%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""


def program(*lines, before=""):
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule made_up\n\n{ADD}\n{before}\nENTRY %main (a: f32[4]) -> f32[4] {{\n{body}\n}}\n"


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[]", 4),
        ("bf16[8,128]{1,0:T(8,128)}", 2048),
        ("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}", 2048),
        ("pred[3]", 3),
        ("s4[3]{0:T(1024)E(4)}", 2),
        ("f8e4m3fn[2,2]", 4),
        ("c64[2]", 16),
        ("f32[0,7]", 0),
        ("f32[<=8,2]", 64),
        ("token[]", 0),
        ("(f32[2]{0}, (bf16[4]{0}, u32[]{:S(2)}), token[])", 8 + 8 + 4),
    ],
)
def test_bytes_of_a_shape(shape, size):
    assert shape_bytes(shape) == size


def test_an_unknown_element_type_is_an_error():
    with pytest.raises(ValueError, match="blob"):
        shape_bytes("blob[4]")


# -------------------------------------------------------------------------------------------------- one operation
@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("replica_groups={{0,2,4,6},{1,3,5,7}}", 4),
        ("replica_groups={}", 8),
        ("replica_groups=[2,4]<=[8]", 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_0'}", 4),
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
        "%h = f32[12] all-gather-done(%g)",
        "%p = (f32[5], f32[5], u32[], u32[]) collective-permute-start(%h), channel_id=3, source_target_pairs={{0,1}}",
        "%q = f32[5] collective-permute-done(%p)",
        "%w = ((f32[8]), f32[2], u32[]) async-start(%q), calls=%wrapped",
        "ROOT %z = f32[2] async-done(%w)",
        before="%wrapped (b: f32[8]) -> f32[2] {\n  %b = f32[8] parameter(0)\n"
        "  ROOT %c = f32[2] reduce-scatter(%b), channel_id=4, replica_groups=[1,4]<=[4], to_apply=%add\n}\n",
    )
    assert collectives(text, 4) == [
        Collective("all-reduce", 40, 4),
        Collective("all-gather", 48, 4),
        Collective("collective-permute", 20, 4),
        Collective("reduce-scatter", 32, 4),
    ]


def test_pieces_of_a_collective_in_several_fusions_count_once():
    piece = "%g = f32[8] all-gather(%b), channel_id=6, replica_groups=[1,4]<=[4], dimensions={0}"
    before = "".join(f"%part{k} (b: f32[2]) -> f32[8] {{\n  {piece}\n}}\n" for k in range(3))
    text = program(*(f"%f{k} = f32[8] fusion(%a), kind=kCustom, calls=%part{k}" for k in range(3)), before=before)
    assert collectives(text, 4) == [Collective("all-gather", 32, 4)]


def test_the_tpu_compilers_reduce_scatter_is_an_all_reduce_in_a_fusion():
    before = (
        "%all-reduce-scatter.1 (b: f32[8]) -> f32[2] {\n  %b = f32[8] parameter(0)\n"
        "  %r = f32[8]{0:T(128)} all-reduce(%b), channel_id=3, replica_groups={{0,1,2,3}}, to_apply=%add\n"
        "  ROOT %s = f32[2] dynamic-slice(%r), dynamic_slice_sizes={2}\n}\n"
    )
    text = program("ROOT %f = f32[2] fusion(%a), kind=kCustom, calls=%all-reduce-scatter.1", before=before)
    assert collectives(text, 4) == [Collective("reduce-scatter", 32, 4)]


def test_the_bytes_of_a_tuple_with_comments_are_summed():
    text = program(
        "%r = (f32[2]{0:T(128)}, bf16[3,2]{1,0}, /*index=2*/f32[]) all-to-all(%a, %a, /*index=2*/%a), channel_id=1"
    )
    assert collectives(text, 2) == [Collective("all-to-all", 8 + 12 + 4, 2)]


# --------------------------------------------------------------------------------------------- loops and branches
LOOP = """%cond (c: (s32[], f32[4])) -> pred[] {{
  %c = (s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[]{{:T(128)}} constant(6)
  ROOT %lt = pred[] compare({order}), direction=LT
}}
%body (b: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %r = f32[4] all-reduce(%x), channel_id=2, replica_groups={{{{0,1}}}}, to_apply=%add
  ROOT %t = (s32[], f32[4]) tuple(%i, %r)
}}
"""


def loop(*, order="%i, %n", start="0", notes=""):
    return program(
        f"%zero = s32[] constant({start})",
        "%first = s32[] copy(%zero)",
        "%t = (s32[], f32[4]) tuple(%first, %a)",
        f"ROOT %w = (s32[], f32[4]) while(%t), condition=%cond, body=%body{notes}",
        before=LOOP.format(order=order),
    )


def test_a_loop_counts_by_its_trip_count():
    assert collectives(loop(), 2) == [Collective("all-reduce", 16, 2, times=6)]
    known = loop(order="%n, %i", notes=', backend_config={"known_trip_count":{"n":"3"},"known_init_step":{}}')
    assert collectives(known, 2) == [Collective("all-reduce", 16, 2, times=3)]


@pytest.mark.parametrize("unclear", [{"order": "%n, %i"}, {"start": "2"}])
def test_a_loop_of_unknown_length_counts_once_and_is_marked(unclear):
    assert collectives(loop(**unclear), 2) == [Collective("all-reduce", 16, 2, counted=False)]


def test_of_branches_the_one_with_the_most_traffic_counts():
    before = "".join(
        f"%branch{size} (b: f32[4]) -> f32[4] {{\n"
        f"  ROOT %r = f32[{size}] all-reduce(%b), channel_id={size}, replica_groups={{}}, to_apply=%add\n}}\n"
        for size in (2, 5)
    )
    text = program("%c = f32[4] conditional(%p, %a, %a), branch_computations={%branch2, %branch5}", before=before)
    assert collectives(text, 2) == [Collective("all-reduce", 20, 2)]


# ---------------------------------------------------------------------------------------------------------- totals
def test_totals_and_bytes_on_the_wire():
    found = [
        Collective("all-reduce", 100, 4, times=3),
        Collective("all-gather", 100, 4),
        Collective("collective-permute", 100, 4),
        Collective("all-reduce", 8, 2),
    ]
    assert totals(found) == {
        "all-gather": {"count": 1, "bytes": 100, "wire_bytes": 75.0},
        "all-reduce": {"count": 4, "bytes": 308, "wire_bytes": 3 * 2 * 75.0 + 8.0},
        "collective-permute": {"count": 1, "bytes": 100, "wire_bytes": 100.0},
    }
    assert totals([]) == {}


def test_a_real_program_without_collectives_and_a_text_that_is_not_a_program():
    compiled = jax.jit(lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, length=3)[0]).lower(jnp.ones(2)).compile()
    assert collectives(compiled.as_text(), 1) == []
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.collectives("nothing", 1)
