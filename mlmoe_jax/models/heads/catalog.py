"""All heads by name, with the config keys that each reads. A new head is its file and its entry here.

This module does not import jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ml_collections import ConfigDict

from mlmoe_jax.runtime.keys import ChoiceKey, FlagKey, IntegerKey, NumberKey, PathKey, keys_of, section
from mlmoe_jax.runtime.registry import Registry, component

if TYPE_CHECKING:
    from mlmoe_jax.models.contracts import Head

# ------------------------------------------------------------------------------------------ keys of more than one head
_NAMES = PathKey(
    "",
    "Vectors of the label names (.safetensors, of mlmoe encode), or a list of names, one per line; for cosine its "
    "classifier, for query and routed_experts what their queries are computed from, for ml_gcn its word vectors.",
)

_DECODER = section(
    "Learned queries that read the image tokens through a transformer.",
    style=ChoiceKey(
        "dr_moe",
        "Architecture, by paper.",
        choices={
            "dr_moe": "a transformer on the queries, sines added to the patches once",
            "independent": "dr_moe without self-attention between queries, for many labels",
            "q2l": "queries and sines added in every layer, no self-attention between queries",
            "q2l_self_attention": "q2l with self-attention, a flag of the authors' code",
            "ml_decoder": "fixed queries, LN(x + dropout(x)) for their self-attention, a projection with ReLU",
        },
    ),
    width=IntegerKey(512, "Width of the tokens; 0 means the backbone's.", least=0, most=65_536),
    heads=IntegerKey(8, "Attention heads.", above=0, most=1_024),
    hidden=IntegerKey(2048, "Hidden width of the feed-forward networks.", above=0, most=65_536),
    encoder_layers=IntegerKey(2, "Encoder layers.", least=0, most=12),
    decoder_layers=IntegerKey(2, "Decoder layers.", above=0, most=12),
    queries=IntegerKey(
        0,
        "Learned queries; 0 is one per label, fewer are shared by groups of labels.",
        least=0,
        only_if={"model.head.kind": ("query",)},
    ),
    dropout=NumberKey(0.1, "Dropout rate of all layers.", least=0, most=1),
    attention_dropout=FlagKey(
        True, "Apply the dropout to attention weights too; for many labels they take most of the memory."
    ),
)

_ROUTING = section(
    "The mixture of shared and task experts per label.",
    expert=ChoiceKey(
        "relu_linear",
        "Architecture of an expert.",
        choices={
            "relu_linear": "a linear layer and ReLU (DR-MoE)",
            "ffn": "one hidden layer",
            "ffn_relu": "one hidden layer, ReLU on the output",
        },
    ),
    expert_hidden=IntegerKey(256, "Hidden width of an expert; the output width of relu_linear.", above=0, most=65_536),
    shared_experts=IntegerKey(4, "Experts that all labels share.", least=0, most=4_096),
    task_experts=IntegerKey(1, "Experts of each label alone.", least=0, most=4_096),
    gate=ChoiceKey(
        "mlp",
        "How the weights of the experts are computed.",
        choices={
            "mlp": "one hidden layer (DR-MoE)",
            "linear": "a linear layer (HSQ)",
            "static": "learned, equal for every image",
        },
    ),
    gate_hidden=IntegerKey(256, "Hidden width of a gate.", above=0, most=65_536, only_if={"gate": ("mlp",)}),
    gate_share=ChoiceKey("per_label", "Whether each label has its own gate.", choices=("per_label", "shared")),
    classifier=ChoiceKey(
        "per_label",
        "Whether each label has its own classifier; DR-MoE prints shared.",
        choices=("per_label", "shared"),
    ),
    entropy=ChoiceKey(
        "maximize",
        "Direction of the entropy penalty on the gates.",
        choices={
            "maximize": "raise the entropy, as DR-MoE's text says",
            "paper": "lower the entropy, as DR-MoE prints",
            "off": "no penalty",
        },
    ),
)

_RESIDUAL = ChoiceKey(
    "none",
    "What is added to the logits.",
    choices={"none": "nothing", "pooled": "a linear classifier of the mean patch, which starts at 0"},
)

_COMBINE = ChoiceKey(
    "mean_logit",
    "How the predictions of the two sides are combined.",
    choices={"mean_logit": "mean of the logits (code)", "mean_probability": "mean of the probabilities (paper)"},
    only_if={"model.prompts.sides": ("both",)},
)

_GRAPH = section(
    "A graph of the labels.",
    hidden=IntegerKey(1024, "Hidden width of the graph network.", above=0, most=65_536),
    word_vectors=PathKey(
        "",
        "Text file of word vectors such as GloVe's; if empty, computed from the training labels.",
        only_if={"model.head.kind": ("ml_gcn",)},
    ),
    vector_width=IntegerKey(
        300, "Width of the computed vectors.", above=0, most=65_536, only_if={"model.head.kind": ("ml_gcn",)}
    ),
)

# -------------------------------------------------------------------------------------------------------- the registry
# By the values of `config.model.head.kind`
HEADS: Registry[type[Head]] = Registry(
    "head",
    {
        "linear": component(
            "mlmoe_jax.models.heads.linear:LinearHead",
            pool=ChoiceKey(
                "cls",
                "What is classified.",
                choices={
                    "cls": "the class token",
                    "patches": "every patch, then a smooth maximum",
                    "both": "the mean of both",
                    "max": "the largest value of each channel over the patches",
                    "mean": "the mean of prompts and patches, as VPT, GateVPT and E2VPT do on MAE",
                },
            ),
        ),
        "cosine": component("mlmoe_jax.models.heads.cosine:CosineHead", names=_NAMES),
        "group_experts": component(
            "mlmoe_jax.models.heads.group_experts:GroupExpertsHead",
            expert_hidden=IntegerKey(5, "Hidden width of an expert.", above=0, most=65_536),
            activation=ChoiceKey(
                "gelu",
                "Activation of the experts.",
                choices={"gelu": "the exact GELU (code)", "relu": "ReLU (paper)"},
            ),
            gates_of=ChoiceKey(
                "label",
                "What has a gate.",
                choices={"label": "each label", "group": "each label group, strategy 1 of the paper"},
            ),
            gate_bias=ChoiceKey(
                "unused",
                "Whether gates add their bias.",
                choices={"unused": "allocated and left out (code)", "used": "added (paper)"},
            ),
            combine=_COMBINE,
        ),
        "group_linear": component("mlmoe_jax.models.heads.group_experts:GroupLinearHead", combine=_COMBINE),
        "query": component(
            "mlmoe_jax.models.heads.query:QueryHead", names=_NAMES, residual=_RESIDUAL, decoder=_DECODER
        ),
        "routed_experts": component(
            "mlmoe_jax.models.heads.dr_moe:RoutedExpertsHead",
            names=_NAMES,
            residual=_RESIDUAL,
            decoder=_DECODER,
            routing=_ROUTING,
        ),
        "ml_gcn": component("mlmoe_jax.models.heads.gcn:MLGCNHead", names=_NAMES, graph=_GRAPH),
        "add_gcn": component("mlmoe_jax.models.heads.gcn:ADDGCNHead", graph=_GRAPH),
        "csra": component(
            "mlmoe_jax.models.heads.csra:CSRAHead",
            csra=section(
                "Attention of each label over the cells of the feature map.",
                heads=IntegerKey(1, "Classifiers with temperatures of their own: 1, 2, 4, 6 or 8.", least=1, most=8),
                weight=NumberKey(0.1, "Weight λ of the attended scores.", least=0),
            ),
        ),
        "pat": "mlmoe_jax.models.heads.patching:PatchingHead",
        "cnn_rnn": component(
            "mlmoe_jax.models.heads.sequence:CNNRNNHead",
            sequence=section(
                "An LSTM that predicts the labels one after the other.",
                embedding=IntegerKey(64, "Width of the label embedding.", above=0, most=65_536),
                hidden=IntegerKey(512, "Width of the LSTM's state.", above=0, most=65_536),
                max_labels=IntegerKey(20, "Labels per sequence, in training and in search.", above=0, most=1_000),
            ),
        ),
    },
)

HEAD_KEYS = section(
    "The part of the model that turns features into a logit per label.",
    kind=ChoiceKey(
        "linear",
        "Head: cosine classifies by names, group_experts is ML-VPT's, group_linear GVPT's, query Q2L's and "
        "ML-Decoder's, routed_experts DR-MoE's, HSQ's and, with group prompts, MLMoE's.",
        choices=HEADS,
        required=True,
    ),
    **keys_of(HEADS, "kind"),
)


def head_class(config: ConfigDict) -> type[Head]:
    """Return the class of the head of a config."""
    return HEADS[config.model.head.kind]
