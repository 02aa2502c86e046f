"""The text towers of all families. A new family is a module with a table of entries, and a line here."""

from mlmoe_jax.errors import UserError
from mlmoe_jax.models.backbones import catalog
from mlmoe_jax.models.text.entry import TextEntry
from mlmoe_jax.runtime.registry import Registry

TEXT_FAMILIES: Registry[dict[str, TextEntry]] = Registry(
    "family of text towers",
    {
        "clip": "mlmoe_jax.models.text.clip:CLIP_TEXTS",
        "siglip": "mlmoe_jax.models.text.siglip:SIGLIP_TEXTS",
        "tips": "mlmoe_jax.models.text.tips:TIPS_TEXTS",
    },
)
TEXT_CATALOG: dict[str, TextEntry] = {
    name: entry for family in TEXT_FAMILIES for name, entry in TEXT_FAMILIES[family].items()
}


def text_entry(backbone: str) -> TextEntry:
    """Return the entry of the text tower that belongs to a backbone.

    Raises UserError for an unknown backbone, and for a backbone that was trained without texts.
    """
    catalog.entry(backbone)
    if backbone not in TEXT_CATALOG:
        raise UserError(
            f"the backbone {backbone} was trained without texts, so it has no vectors of names; "
            f"there are {', '.join(TEXT_CATALOG)}"
        )
    return TEXT_CATALOG[backbone]
