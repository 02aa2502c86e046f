"""All losses by name, with the config keys that each reads. A new loss is its file and its entry here.

This module does not import jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlmoe_jax.runtime.keys import BY_STEPS, ChoiceKey, IntegerKey, NumberKey, PathKey, keys_of, section
from mlmoe_jax.runtime.registry import Registry, component

if TYPE_CHECKING:
    from mlmoe_jax.models.losses import Loss

_ASYMMETRIC = {
    "gamma_neg": NumberKey(2.0, "Focusing exponent of negative labels.", least=0),
    "gamma_pos": NumberKey(0.0, "Focusing exponent of positive labels.", least=0),
    "clip": NumberKey(0.0, "Probability margin of negative labels.", least=0, below=1),
}
_GAMMA = NumberKey(2.0, "Focusing exponent; for hill, of positives.", least=0)
_LARGE_LOSS_RATE = NumberKey(
    0.002,
    "Share of changed losses: for ll_r and ll_ct its growth per epoch, for ll_cp the share.",
    above=0,
    below=1,
)
_EXPECTED_POSITIVES = NumberKey(0.0, "Mean number of labels per image, 2.9 for COCO; 0 is unset.", least=0)
_SELECTIVE = {"unknown": ("selective",)}

# By the values of `config.loss.kind`
LOSSES: Registry[type[Loss]] = Registry(
    "loss",
    {
        "asymmetric": component(
            "mlmoe_jax.models.losses:Asymmetric",
            **_ASYMMETRIC,
            eps=NumberKey(1e-5, "Lowest probability in a logarithm.", above=0),
        ),
        "bce": component(
            "mlmoe_jax.models.losses:BinaryCrossEntropy",
            positive_weight=NumberKey(
                1.0, "Factor of positive labels; 0 takes negatives / positives of the training label.", least=0
            ),
        ),
        "focal": component("mlmoe_jax.models.losses:Focal", gamma=_GAMMA),
        "softmax": "mlmoe_jax.models.losses:Softmax",
        "hill": component("mlmoe_jax.models.missing_labels:Hill", gamma=_GAMMA),
        "focal_margin": component("mlmoe_jax.models.missing_labels:FocalMargin", gamma=_GAMMA),
        "splc": component("mlmoe_jax.models.missing_labels:SPLC", gamma=_GAMMA),
        "ll_r": component("mlmoe_jax.models.missing_labels:LargeLossRejection", large_loss_rate=_LARGE_LOSS_RATE),
        "ll_ct": component("mlmoe_jax.models.missing_labels:LargeLossCorrection", large_loss_rate=_LARGE_LOSS_RATE),
        "ll_cp": component(
            "mlmoe_jax.models.missing_labels:LargeLossPermanentCorrection", large_loss_rate=_LARGE_LOSS_RATE
        ),
        "an": "mlmoe_jax.models.missing_labels:AssumeNegative",
        "iu": "mlmoe_jax.models.missing_labels:IgnoreUnknown",
        "wan": "mlmoe_jax.models.missing_labels:WeakAssumeNegative",
        "an_ls": "mlmoe_jax.models.missing_labels:SmoothedAssumeNegative",
        "epr": component("mlmoe_jax.models.missing_labels:ExpectedPositives", expected_positives=_EXPECTED_POSITIVES),
        "role": component("mlmoe_jax.models.missing_labels:ROLE", expected_positives=_EXPECTED_POSITIVES),
        "distribution_balanced": component("mlmoe_jax.models.missing_labels:DistributionBalanced", gamma=_GAMMA),
        "csl": component(
            "mlmoe_jax.models.selective_loss:PartialAsymmetric",
            **_ASYMMETRIC,
            gamma_unann=NumberKey(2.0, "Focusing exponent of unknown labels.", least=0),
            alpha_pos=NumberKey(1.0, "Weight of positive labels.", least=0),
            alpha_neg=NumberKey(1.0, "Weight of negative labels.", least=0),
            alpha_unann=NumberKey(1.0, "Weight of unknown labels.", least=0),
            likelihood_topk=IntegerKey(
                5,
                "Unknown labels per image of a batch, the likeliest, without a loss.",
                least=0,
                only_if=_SELECTIVE,
            ),
            prior=PathKey(
                "",
                "A run with scores of the training split, whose mean per label is the prior of the label, or a .csv "
                "file with two columns, label and prior; if empty, only likely labels are left out.",
                only_if=_SELECTIVE,
            ),
            prior_threshold=NumberKey(
                0.05,
                "Unknown labels with a prior above it have no loss; 0 is off.",
                least=0,
                most=1,
                only_if=_SELECTIVE,
            ),
        ),
    },
)


TERM_KEYS = section(
    "Weights of the head's terms: cls and patches of linear; cls and quarters of pat; map and graph of add_gcn; co and "
    "dc of the group heads, co_gate and dc_gate of group_experts.",
    only_if=BY_STEPS,
    shared="value",  # a head refuses weights of terms that it does not compute
    further=NumberKey(0.0, "Weight of a further term of the head."),
    logits=NumberKey(1.0, "Weight of the loss of the final logits."),
)

LOSS_KEYS = section(
    "A loss per image and label, reduced to one number and summed over weighted terms.",
    stages=("train",),
    kind=ChoiceKey(
        "asymmetric",
        "Loss: asymmetric is ASL, bce binary cross-entropy; softmax needs exactly one label per image; docs/methods.md "
        "says which are for missing labels.",
        choices=LOSSES,
    ),
    unknown=ChoiceKey(
        "auto",
        "How unknown labels count.",
        choices={
            "auto": "negative for losses for missing labels, else ignore",
            "ignore": "not at all",
            "negative": "as absent",
            "selective": "csl: as absent, except the likeliest of a batch and those of frequent labels",
            "normalize": "csl: as ignore; the losses of an image with m known labels grow by 1 / (1 + m)",
        },
    ),
    **keys_of(LOSSES, "kind"),
    reduce=ChoiceKey("mean", "How losses become one number.", choices=("mean", "sum"), only_if=BY_STEPS),
    scale=NumberKey(1000.0, "Factor of the reduced loss.", above=0, only_if=BY_STEPS),
    terms=TERM_KEYS,
)
