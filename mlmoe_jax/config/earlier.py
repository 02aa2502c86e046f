"""Translation of stored configs from earlier versions to the present keys."""

from collections.abc import Mapping
from typing import Any

from mlmoe_jax.config.keys import tuples
from mlmoe_jax.errors import UserError

# Removed keys that a trained model depends on, with their fixed values. All other removed keys are ignored.
CONSTANT = {
    "model.prompts.segments": 16,
    "model.head.graph.share": 0.2,
    "model.head.graph.threshold": 0.4,
    "model.head.sequence.beam_width": 4,
}
_DECODER = "model.head.decoder."
# The removed keys that `model.head.decoder.style` replaces, and their values for each style.
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


def present_keys(stored: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return a stored config, dotted key -> value; UserError, which names `source`, for an unsupported model."""
    config = dict(stored)
    for name, value in CONSTANT.items():
        if tuples(config.pop(name, value)) != value:
            raise UserError(f"{source}: {name} must be {value} in this version; use the version that trained the run")
    if config.get("data.cache") == "ram":
        config["data.cache"] = "disk"
    default = STYLES["dr_moe"]
    values = tuple(config.pop(_DECODER + key, value) for key, value in zip(STYLE_KEYS, default, strict=True))
    if f"{_DECODER}style" not in config and values != default:
        style = next((style for style, settings in STYLES.items() if settings == values), None)
        if style is None and config.get("model.head.kind") in ("query", "routed_experts"):
            raise UserError(f"{source}: this version has no such decoder style; use the version that trained the run")
        config[f"{_DECODER}style"] = style or "dr_moe"
    return config
