"""Keys of the optimizer, the training loop, checkpoints and the device mesh."""

from mlmoe_jax.runtime.keys import (
    BY_STEPS,
    ChoiceKey,
    FlagKey,
    FractionsKey,
    IntegerKey,
    NumberKey,
    RulesKey,
    others,
    section,
)

OPTIM_KEYS = section(
    "The optimizer, its learning rate, and exceptions by parameter path.",
    stages=("train",),
    only_if=BY_STEPS,
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
    warmup_steps=NumberKey(
        0.0,
        "Length of a linear rise from 0; below 1, a fraction of all steps.",
        least=0,
        unit="steps",
        only_if={"schedule": others("one_cycle")},
    ),
    milestones=FractionsKey(
        (0.6, 0.8), "Fractions of the training at which the rate falls.", only_if={"schedule": ("multi_step",)}
    ),
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
    stages=("train",),
    only_if=BY_STEPS,
    decay=NumberKey(0.9997, "Decay per step; 0 keeps no average.", least=0, most=1),
    warmup=FlagKey(
        True, "Let the decay grow as (1 + step)/(10 + step), so that the initial values do not count; papers have none."
    ),
)

TRAIN_KEYS = section(
    "The training loop.",
    stages=("train",),
    fit=ChoiceKey(
        "steps",
        "How parameters are fitted; logistic ignores the keys of steps, such as optim.",
        choices={
            "steps": "steps of the optimizer on batches",
            "logistic": "logistic regression on cached features, with the L2 penalty of the least cross-validated "
            "log loss",
        },
    ),
    epochs=IntegerKey(40, "Passes over the training split.", above=0, only_if=BY_STEPS),
    batch_size=IntegerKey(64, "Images per step over all devices.", above=0, only_if=BY_STEPS),
    accumulate=IntegerKey(
        1,
        "Parts of a batch, computed one after the other to save memory; batch statistics, and the losses ll_r, ll_ct, "
        "ll_cp, epr, role and csl, are of a part.",
        above=0,
        only_if=BY_STEPS,
        on_resume="reported",
    ),
    log_every=IntegerKey(
        20, "Interval between rows of the log.", above=0, unit="steps", only_if=BY_STEPS, on_resume="free"
    ),
    patience=IntegerKey(
        0,
        "Stop early if the best eval.select_metric of all and of the raw weights are older, and the EMA is below its "
        "best; 0 is off.",
        least=0,
        unit="epochs",
        only_if=BY_STEPS,
    ),
    skip_nonfinite=IntegerKey(
        0,
        "Steps with a non-finite loss or gradient to skip; one more ends the training.",
        least=0,
        unit="steps",
        only_if=BY_STEPS,
        on_resume="free",
    ),
    save_backbone=FlagKey(False, "Write backbone.safetensors, in float16, at the end."),
)

CHECKPOINT_KEYS = section(
    "The checkpoints in the run folder.",
    stages=("train",),
    only_if=BY_STEPS,
    on_resume="free",
    every_epochs=NumberKey(1.0, "Interval between checkpoints; it may be a fraction.", above=0, unit="epochs"),
    keep=IntegerKey(2, "Checkpoints that are kept.", above=0),
)

MESH_KEYS = section(
    "Devices along two axes of the mesh; one may be -1, which takes all, and batches are sharded over all axes.",
    stages=("train", "score"),
    on_resume="free",
    shared="default",
    fsdp=IntegerKey(1, "Devices over which large parameters, and batches, are sharded.", least=-1),
    expert=IntegerKey(1, "Devices over which the labels of a head, and batches, are sharded.", least=-1),
)
