"""Keys of the loss, the optimizer, the training loop, checkpoints and the device mesh."""

from mlmoe_jax.config.keys import ChoiceKey, FlagKey, FractionsKey, IntegerKey, NumberKey, RulesKey, TextKey, section
from mlmoe_jax.models.registries import LOSSES

TERM_KEYS = section(
    "Weights of the head's terms: cls and patches of linear; cls and quarters of pat; map and graph of add_gcn; co and "
    "dc of the group heads, co_gate and dc_gate of group_experts.",
    further=NumberKey(0.0, "Weight of a further term of the head."),
    logits=NumberKey(1.0, "Weight of the loss of the final logits."),
)

LOSS_KEYS = section(
    "A loss per image and label, reduced to one number and summed over weighted terms.",
    kind=ChoiceKey(
        "asymmetric",
        "Loss: asymmetric is ASL, bce binary cross-entropy; softmax needs exactly one label per image; all after it "
        "are for missing labels.",
        choices=LOSSES,
    ),
    unknown=ChoiceKey(
        "auto",
        "How unknown labels count.",
        choices={
            "auto": "negative for losses for missing labels, else ignore",
            "ignore": "not at all",
            "negative": "as absent",
            "selective": "for csl: as absent, except the likeliest of a batch and those of frequent labels",
            "normalize": "for csl: as ignore; the losses of an image with m known labels grow by 1 / (1 + m)",
        },
    ),
    gamma_neg=NumberKey(2.0, "For asymmetric, csl: focusing exponent of negative labels.", least=0),
    gamma_pos=NumberKey(0.0, "For asymmetric, csl: focusing exponent of positive labels.", least=0),
    clip=NumberKey(0.0, "For asymmetric, csl: probability margin of negative labels.", least=0, below=1),
    gamma_unann=NumberKey(2.0, "For csl: focusing exponent of unknown labels.", least=0),
    alpha_pos=NumberKey(1.0, "For csl: weight of positive labels.", least=0),
    alpha_neg=NumberKey(1.0, "For csl: weight of negative labels.", least=0),
    alpha_unann=NumberKey(1.0, "For csl: weight of unknown labels.", least=0),
    likelihood_topk=IntegerKey(
        5, "For csl, unknown=selective: unknown labels per image of a batch, the likeliest, without a loss.", least=0
    ),
    prior=TextKey(
        "",
        "For csl, unknown=selective: a run with scores of the training split, whose mean per label is the prior of the "
        "label, or a .csv file with two columns, label and prior; if empty, only likely labels are left out.",
    ),
    prior_threshold=NumberKey(
        0.05,
        "For csl, unknown=selective: unknown labels with a prior above it have no loss; 0 is off.",
        least=0,
        most=1,
    ),
    eps=NumberKey(1e-5, "For asymmetric: lowest probability in a logarithm.", above=0),
    gamma=NumberKey(
        2.0, "For focal, focal_margin, splc, distribution_balanced: focusing exponent; for hill, of positives.", least=0
    ),
    positive_weight=NumberKey(
        1.0, "For bce: factor of positive labels; 0 takes negatives / positives of the training label.", least=0
    ),
    large_loss_rate=NumberKey(
        0.002,
        "For ll_r, ll_ct: growth per epoch of the share of changed losses; for ll_cp: this share.",
        above=0,
        below=1,
    ),
    expected_positives=NumberKey(
        0.0, "For epr, role: mean number of labels per image, 2.9 for COCO; 0 is unset.", least=0
    ),
    reduce=ChoiceKey("mean", "How losses become one number.", choices=("mean", "sum")),
    scale=NumberKey(1000.0, "Factor of the reduced loss.", above=0),
    terms=TERM_KEYS,
)

OPTIM_KEYS = section(
    "The optimizer, its learning rate, and exceptions by parameter path.",
    name=ChoiceKey(
        "adamw",
        "Optimizer.",
        choices={
            "adamw": "decoupled weight decay",
            "adam": "decay added to the gradient",
            "sgd": "momentum b1, decay added to the gradient",
            "muon": "Muon for the matrices of the backbone, else AdamW",
        },
    ),
    learning_rate=NumberKey(1e-3, "Peak of the learning rate.", above=0),
    schedule=ChoiceKey(
        "one_cycle",
        "How the learning rate changes.",
        choices={
            "one_cycle": "PyTorch's OneCycleLR, which cycles b1 too",
            "cosine": "a cosine to 0",
            "constant": "constant",
            "multi_step": "divided by 10 at each milestone",
        },
    ),
    warmup_steps=IntegerKey(0, "Except for one_cycle: length of a linear rise from 0.", least=0, unit="steps"),
    milestones=FractionsKey((0.6, 0.8), "For multi_step: fractions of the training at which the rate falls."),
    weight_decay=NumberKey(1e-2, "Weight decay, multiplied by the learning rate.", least=0),
    b1=NumberKey(
        0.9,
        "Decay of the first moment, or momentum; one_cycle cycles it from 0.95 to 0.85 and back.",
        least=0,
        below=1,
    ),
    b2=NumberKey(0.999, "Decay of the second moment.", least=0, below=1),
    clip_norm=NumberKey(0.0, "Largest norm of all gradients; 0 is off.", least=0),
    rate_rules=RulesKey((), "Factors of the learning rate by parameter path; the first match counts.", factors=True),
    decay_rules=RulesKey((), "Factors of the weight decay by parameter path; the first match counts.", factors=True),
)

EMA_KEYS = section(
    "The moving average of the parameters, evaluated beside the raw parameters.",
    decay=NumberKey(0.9997, "Decay per step; 0 keeps no average.", least=0, most=1),
)

TRAIN_KEYS = section(
    "The training loop.",
    fit=ChoiceKey(
        "steps",
        "How parameters are fitted; logistic ignores all keys of steps (optim, ema, epochs, …) and selection.",
        choices={
            "steps": "steps of the optimizer on batches",
            "logistic": "logistic regression on cached features, with the L2 penalty of the least cross-validated "
            "log loss",
        },
    ),
    epochs=IntegerKey(40, "Passes over the training split.", above=0),
    batch_size=IntegerKey(64, "Images per step over all devices.", above=0),
    accumulate=IntegerKey(
        1,
        "Parts of a batch, computed one after the other to save memory; batch statistics, and the losses ll_r, ll_ct, "
        "ll_cp, epr, role and csl, are of a part.",
        above=0,
    ),
    log_every=IntegerKey(20, "Interval between rows of the log.", above=0, unit="steps"),
    patience=IntegerKey(
        0,
        "Stop early if the best eval.select_metric of all and of the raw weights are older, and the EMA is below its "
        "best; 0 is off.",
        least=0,
        unit="epochs",
    ),
    skip_nonfinite=IntegerKey(
        0,
        "Steps with a non-finite loss or gradient to skip; one more ends the training.",
        least=0,
        unit="steps",
    ),
    save_backbone=FlagKey(False, "Write backbone.safetensors, in float16, at the end."),
)

CHECKPOINT_KEYS = section(
    "The checkpoints in the run folder.",
    every_epochs=NumberKey(1.0, "Interval between checkpoints; it may be a fraction.", above=0, unit="epochs"),
    keep=IntegerKey(2, "Checkpoints that are kept.", above=0),
)

MESH_KEYS = section(
    "Devices along two axes of the mesh; one may be -1, which takes all, and batches are sharded over all axes.",
    fsdp=IntegerKey(1, "Devices over which large parameters, and batches, are sharded.", least=-1),
    expert=IntegerKey(1, "Devices over which the labels of a head, and batches, are sharded.", least=-1),
)
