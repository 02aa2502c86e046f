"""The layout of SigLIP and SigLIP 2 of Hugging Face; of the whole model, only the vision tower is read."""

from mlmoe_jax.pretrained.rules.base import Rule, Source
from mlmoe_jax.pretrained.rules.clip import HUGGING_FACE_BESIDE, hugging_face_tower
from mlmoe_jax.pretrained.rules.query import attention
from mlmoe_jax.pretrained.rules.vit import linear, norm

SIGLIP = Source(
    "hugging_face_siglip",
    "head.probe",
    (
        *hugging_face_tower(),
        Rule(r"head\.probe", "pool/query"),
        *attention(r"head\.attention", "pool/attn"),
        *norm(r"head\.layernorm", "pool/norm"),
        *linear(r"head\.mlp\.(fc[12])", r"pool/mlp/\1"),
    ),
    ignored=HUGGING_FACE_BESIDE,
)
SOURCES = (SIGLIP,)
