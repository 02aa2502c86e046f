"""Stored configs of earlier states of this version, in the keys of today."""

from collections.abc import Mapping
from typing import Any

from mlmoe_jax.config.keys import tuples
from mlmoe_jax.errors import UserError

# Keys that are constants now, and of which a trained model depends; all others are ignored like unknown keys.
CONSTANT = {
    "model.prompts.segments": 16,
    "model.head.graph.share": 0.2,
    "model.head.graph.threshold": 0.4,
    "model.head.sequence.beam_width": 4,
}
_DECODER = "model.head.decoder."
# The keys that `model.head.decoder.style` replaces, with the values of each style.
STYLE_KEYS = (
    *("self_attention", "query_role", "fixed_queries", "positions", "pre_norm"),
    *("decoder_norm", "activation", "project", "init"),
)
STYLES = {
    "dr_moe": ("all", "input", False, "once", False, True, "relu", "auto", "xavier"),
    "independent": ("none", "input", False, "once", False, True, "relu", "auto", "xavier"),
    "q2l": ("none", "added", False, "detr", False, True, "relu", "auto", "xavier"),
    "q2l_self_attention": ("all", "added", False, "detr", False, True, "relu", "auto", "xavier"),
    "ml_decoder": ("identity", "input", True, "none", False, False, "relu", "linear_relu", "torch"),
}


def in_keys_of_today(stored: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return a stored config, dotted key -> value; UserError, which names `source`, for an unsupported model."""
    today = dict(stored)
    for name, value in CONSTANT.items():
        if tuples(today.pop(name, value)) != value:
            raise UserError(f"{source} has another {name} than {value}; use the version that trained the run")
    if today.get("data.cache") == "ram":
        today["data.cache"] = "disk"
    first = STYLES["dr_moe"]
    values = tuple(today.pop(_DECODER + key, value) for key, value in zip(STYLE_KEYS, first, strict=True))
    if f"{_DECODER}style" not in today and values != first:
        style = next((style for style, earlier in STYLES.items() if earlier == values), None)
        if style is None and today.get("model.head.kind") in ("query", "routed_experts"):
            raise UserError(f"{source} has a decoder of no style of this version; use the version that trained the run")
        today[f"{_DECODER}style"] = style or "dr_moe"
    return today
