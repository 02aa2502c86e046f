"""Keys of the report."""

from mlmoe_jax.runtime.keys import IntegerKey, section

REPORT_KEYS = section(
    "Sample images that a run keeps for mlmoe report.",
    stages=("report",),
    on_resume="free",
    samples=IntegerKey(0, "Sample images with gates and attention; 0 keeps none.", least=0, most=64),
)
