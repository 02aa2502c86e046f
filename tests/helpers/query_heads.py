"""Q2L's and ML-Decoder's heads, as their recipes set them, for any sizes."""

from mlmoe_jax.models.heads.query import ML_DECODER_SETTINGS, Q2L_SETTINGS, QueryHead
from mlmoe_jax.models.query_decoder import QueryDecoder


def q2l_head(channels, labels, *, rngs, **changes):
    """Q2L on C = `channels` for K = `labels`; `changes` replace settings of the decoder."""
    settings = {"width": channels, **Q2L_SETTINGS, **changes}
    decoder = QueryDecoder(channels, labels, rngs=rngs, **settings)
    return QueryHead(decoder, labels, classifier="per_label", rngs=rngs)


def ml_decoder_head(channels, labels, *, groups=100, rngs, **changes):
    """ML-Decoder with at most `groups` queries."""
    decoder = QueryDecoder(channels, min(groups, labels), rngs=rngs, **{**ML_DECODER_SETTINGS, **changes})
    return QueryHead(decoder, labels, classifier="grouped", rngs=rngs)
