import jax
import jax.numpy as jnp
import pytest

from mlmoe_jax.runtime import memory

MIB = 2**20


@pytest.fixture
def program():
    """16 MiB in, 4 bytes out, and one or two sorted copies as temporaries, which every compiler counts."""
    shape = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
    return jax.jit(lambda x: jnp.sort(jnp.sin(x))[::-1].cumsum(0).max()).lower(shape).compile()


def test_parts_are_those_of_the_compiler(program):
    parts = memory.memory_parts(program)
    assert (parts["arguments"], parts["outputs"]) == (16 * MIB, 4)
    assert 16 * MIB <= parts["temporaries"] < 80 * MIB


def test_the_description_is_in_gib_and_includes_the_capacity(program, monkeypatch):
    sizes = {"arguments": 3072 * MIB, "outputs": 0, "aliased": 0, "temporaries": 1536 * MIB, "code": 0, "peak": 0}
    monkeypatch.setattr(memory, "memory_parts", lambda compiled: sizes)
    monkeypatch.setattr(memory, "device_capacity", lambda device: (None, "not reported"))
    shares = "GiB per device (arguments 3.00, temporaries 1.50)"
    assert memory.describe_memory("a step", program) == f"a step needs 4.50 {shares}"
    monkeypatch.setattr(memory, "device_capacity", lambda device: (80 * 1024 * MIB, "the test"))
    assert memory.describe_memory("a step", program) == f"a step needs 4.50 of 80.00 {shares}"


def test_donated_arguments_count_once():
    sizes = {"arguments": 100, "outputs": 50, "aliased": 40, "temporaries": 30, "code": 5, "peak": 0}
    assert memory.required_bytes(sizes) == 145
    assert memory.required_bytes({**sizes, "peak": 200}) == 200, "the compiler reports more"
