"""The named backbones of all families. A new family is a module with a table of entries, and a line here."""

from mlmoe_jax.errors import UserError
from mlmoe_jax.models.backbones.entry import BackboneEntry
from mlmoe_jax.runtime.registry import Registry, suggestion

FAMILIES: Registry[dict[str, BackboneEntry]] = Registry(
    "backbone family",
    {
        "vit": "mlmoe_jax.models.backbones.vit_entries:VITS",
        "resnet": "mlmoe_jax.models.backbones.resnet:RESNETS",
        "convnext": "mlmoe_jax.models.backbones.convnext:CONVNEXTS",
        "efficientnet": "mlmoe_jax.models.backbones.efficientnet:EFFICIENTNETS",
    },
)
CATALOG: dict[str, BackboneEntry] = {name: entry for family in FAMILIES for name, entry in FAMILIES[family].items()}


def entry(name: str) -> BackboneEntry:
    """Return the catalog entry of a backbone. Raises UserError, which suggests known names, for an unknown name."""
    if name not in CATALOG:
        raise UserError(f"there is no backbone '{name}' for model.backbone.name{suggestion(name, CATALOG)}")
    return CATALOG[name]
