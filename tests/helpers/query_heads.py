"""Q2L's and ML-Decoder's heads, as their recipes set them, for any sizes."""

from typing import Any

from ml_collections import ConfigDict

from mlmoe_jax.config import default_config
from mlmoe_jax.models.heads.query import ML_DECODER_SETTINGS, Q2L_SETTINGS, QueryHead
from mlmoe_jax.models.query_decoder import QueryDecoder


def decoder_settings(**changes: Any) -> ConfigDict:
    """The settings of a decoder, by default DR-MoE's."""
    settings = default_config().model.head.decoder
    settings.update(changes)
    return settings


def q2l_head(channels, labels, *, rngs, **changes):
    """Q2L on C = `channels` for K = `labels`; `changes` replace settings of the decoder."""
    settings = decoder_settings(**{"width": channels, **Q2L_SETTINGS, **changes})
    decoder = QueryDecoder(channels, labels, settings, rngs=rngs)
    return QueryHead(decoder, labels, classifier="per_label", rngs=rngs)


def ml_decoder_head(channels, labels, *, groups=100, rngs, **changes):
    """ML-Decoder with at most `groups` queries."""
    settings = decoder_settings(**{**ML_DECODER_SETTINGS, **changes})
    decoder = QueryDecoder(channels, min(groups, labels), settings, rngs=rngs)
    return QueryHead(decoder, labels, classifier="grouped", rngs=rngs)
