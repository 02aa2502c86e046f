"""Device memory: how much a compiled program needs, and how much a device has."""

import contextlib
from collections.abc import Iterator

import jax

from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import GIB

# Advice for a training run that does not fit.
TRAINING_ADVICE = (
    "lower train.batch_size, raise train.accumulate, set model.remat=true, or model.dtype and model.frozen_dtype to "
    "bfloat16"
)


def device_capacity(device: jax.Device) -> tuple[int | None, str]:
    """Return the bytes that this process may use on a device, None if not reported, and a phrase about its origin."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return (limit, "what this process may allocate") if limit else (None, f"not reported by a {device.platform} device")


def memory_parts(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Return the bytes per device that the compiler reports for a program; `aliased` are donated arguments."""
    stats = compiled.memory_analysis()
    return {
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "code": stats.generated_code_size_in_bytes,
        "peak": stats.peak_memory_in_bytes,
    }


def required_bytes(memory: dict[str, int]) -> int:
    """Return the bytes that a program needs on a device, from the result of `memory_parts`.

    They are the sum of the parts, in which donated arguments are counted once, or the peak if that is larger.
    """
    parts = memory["arguments"] + memory["outputs"] - memory["aliased"] + memory["temporaries"] + memory["code"]
    return max(parts, memory["peak"])


def describe_memory(name: str, compiled: jax.stages.Compiled) -> str:
    """Return a line: the memory that the compiled program `name` needs per device, and the capacity of the device."""
    parts, (capacity, _) = memory_parts(compiled), device_capacity(jax.local_devices()[0])
    of = "" if capacity is None else f" of {capacity / GIB:.2f}"
    shares = ", ".join(f"{kind} {parts[kind] / GIB:.2f}" for kind in ("arguments", "temporaries"))
    return f"{name} needs {required_bytes(parts) / GIB:.2f}{of} GiB per device ({shares})"


@contextlib.contextmanager
def shortage_explained(advice: str) -> Iterator[None]:
    """Convert XLA's out-of-memory error in the block to a UserError whose message ends in `advice`."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        if not reason.startswith("RESOURCE_EXHAUSTED"):
            raise
        raise UserError(f"the device is out of memory ({reason.rstrip('. ')}); {advice}") from error
