"""Keys of the backbone, of the prompts, and of how the whole model is computed."""

from mlmoe_jax.config.keys import ChoiceKey, FlagKey, IntegerKey, NumberKey, TextKey, TextsKey, section
from mlmoe_jax.config.tables.head_keys import HEAD_KEYS
from mlmoe_jax.models.registries import PROMPT_KINDS

BACKBONE_KEYS = section(
    "The network that turns an image into tokens, usually pretrained and frozen.",
    name=TextKey("vit_digits", "Backbone, such as dinov2_vitb14, dinov3_vitb16, clip_vitb16 or resnet101."),
    weights=TextKey(
        "auto",
        "Weights: auto is the published file, none is random, anything else a path.",
    ),
    batch_norm=ChoiceKey(
        "frozen",
        "What trains in the batch normalization of a CNN.",
        choices={
            "frozen": "nothing",
            "running": "scale and bias, fixed statistics",
            "trainable": "scale and bias, statistics of the batch",
        },
    ),
    normalization=ChoiceKey(
        "auto",
        "Mean and standard deviation of the channels of an image.",
        choices={"auto": "as the weights were trained", "imagenet": "ImageNet's", "unit": "0 and 1: pixels in 0 … 1"},
    ),
)

PROMPT_KEYS = section(
    "Learned tokens that are added to the tokens of a frozen ViT.",
    kind=ChoiceKey(
        "none",
        "Prompts: deep is VPT-deep, one set per block; shallow is VPT-shallow and GateVPT, one set for all blocks; "
        "e2vpt adds keys and values to deep; group is ML-VPT's, deep prompts per label group and side.",
        choices=PROMPT_KINDS,
    ),
    count=IntegerKey(30, "For deep, shallow, e2vpt: prompts per block.", least=0, most=10_000),
    project=IntegerKey(
        0,
        "Width of the prompts before a linear layer to the backbone's width; 0 is no layer.",
        least=0,
    ),
    dropout=NumberKey(0.0, "Dropout rate of the entries of prompts, drawn per image.", least=0, most=1),
    gated=FlagKey(False, "For shallow: a learned gate per block between a prompt before and after it (GateVPT)."),
    gate_init=NumberKey(10.0, "Gates start at sigmoid(−gate_init)."),
    learn_temperature=FlagKey(False, "For shallow: an attention temperature per block (GateVPT)."),
    key_values=IntegerKey(10, "For e2vpt: additional keys and values per block.", least=0, most=10_000),
    share_key_values=FlagKey(True, "For e2vpt: one tensor for additional keys and values."),
    pruning=ChoiceKey(
        "none",
        "For e2vpt: masks over prompts and segments, of --mode=prune.",
        choices={
            "none": "no masks",
            "learned": "trainable masks, to measure importance",
            "fixed": "masks of kept_tokens and kept_segments",
        },
    ),
    kept_tokens=TextKey(
        "", "For pruning=fixed: 1 (kept) or 0 (pruned) per prompt, such as 1101; if empty, all are kept."
    ),
    kept_segments=TextsKey(
        (), "For pruning=fixed: 1 or 0 per segment, a text of 16 per prompt; if empty, all are kept."
    ),
    pruned=ChoiceKey(
        "absent",
        "For pruning=fixed: what a pruned prompt is.",
        choices={"absent": "removed (paper)", "zeroed": "a zero vector that is attended to (code)"},
    ),
    sides=ChoiceKey(
        "both",
        "For group: which label groups have prompts.",
        choices={
            "both": "co-occurrence (CO) and discriminative (DC)",
            "co": "CO (VPT-CO)",
            "dc": "DC (VPT-DC)",
        },
    ),
    num_groups=IntegerKey(5, "For group: label groups per side.", above=0, most=1_000),
    per_group=IntegerKey(3, "For group: prompts, and experts, per label group.", above=0, most=1_000),
    attention_mask=ChoiceKey(
        "all_prompts",
        "For group: which prompts a prompt attends to.",
        choices={"none": "all", "all_prompts": "itself only (code)", "cross_group": "its group (paper)"},
    ),
    groups=TextKey(
        "computed",
        "Label groups: computed clusters the training labels, published takes the authors', anything else is a .json "
        'file {"co": [...], "dc": [...]}.',
    ),
)

MODEL_KEYS = section(
    "The model: a backbone, prompts inside it, and a head on top.",
    dtype=ChoiceKey(
        "auto",
        "Type of matrix products; trainable parameters stay in float32.",
        choices={
            "auto": "bfloat16 on a GPU or TPU, float32 on a CPU; a resumed run keeps its type",
            "float32": "float32",
            "bfloat16": "bfloat16",
        },
    ),
    remat=FlagKey(False, "Recompute the backbone's blocks in the backward pass: less memory, more time."),
    frozen_dtype=ChoiceKey(
        "auto",
        "Type of the stored frozen weights; bfloat16 halves their memory.",
        choices={
            "auto": "bfloat16 if training and evaluation compute in it, else float32",
            "float32": "float32",
            "bfloat16": "bfloat16",
        },
    ),
    matmul_precision=ChoiceKey(
        "default",
        "JAX's jax_default_matmul_precision, for float32 products on a TPU or GPU.",
        choices={
            "default": "the device's fastest",
            "high": "three bfloat16 passes on a TPU",
            "highest": "full float32",
        },
    ),
    backbone=BACKBONE_KEYS,
    prompts=PROMPT_KEYS,
    adapters=section("Adapters beside the prompts; setting a key, or --config.model.adapters=NAME, adds the adapter."),
    head=HEAD_KEYS,
)
