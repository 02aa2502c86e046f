"""Keys of mlmoe pack and mlmoe prune."""

from mlmoe_jax.runtime.keys import FractionsKey, IntegerKey, section

PACK_KEYS = section(
    "How mlmoe pack stores a data set in shards.",
    stages=("pack",),
    on_resume="free",
    short_side=IntegerKey(
        0,
        "Short side to which larger images are shrunk, as JPEGs; 0 stores files unchanged.",
        least=0,
        unit="pixels",
    ),
)

_LEVELS = tuple(step / 10 for step in range(1, 10))

PRUNE_KEYS = section(
    "How mlmoe prune prunes the prompts of E2VPT.",
    stages=("prune",),
    on_resume="at_start",
    token_levels=FractionsKey(_LEVELS, "Fractions of the prompts to prune, one training each."),
    segment_levels=FractionsKey(
        _LEVELS, "Fractions of each prompt's segments to prune, for every fraction of prompts."
    ),
)
