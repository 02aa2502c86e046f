"""Keys of the backbone, of the prompts, and of how the whole model is computed."""

from mlmoe_jax.config.keys import ANY, Choice, Flag, Integer, Number, Text, Texts, section
from mlmoe_jax.config.tables.heads import HEAD
from mlmoe_jax.models.catalog import PROMPTS as PROMPTS_OF_KIND

BACKBONE = section(
    "The network that turns an image into tokens, usually pretrained and frozen.",
    name=Text("vit_digits", "Name of the backbone, such as dinov2_vitb14, dinov3_vitb16, clip_vitb16 or resnet101."),
    weights=Text(
        "auto",
        "Where the weights come from: auto takes the published file from a package, the cache or the network, none "
        "starts from random values, and anything else is the path of a file.",
    ),
    batch_norm=Choice(
        "frozen",
        "How the batch normalization of a ResNet or an EfficientNet is trained.",
        of={
            "frozen": "scale, bias and statistics do not change",
            "running": "scale and bias can be trained, the statistics do not change",
            "trainable": "scale and bias can be trained, the statistics are those of the batch",
        },
    ),
    normalization=Choice(
        "auto",
        "Mean and standard deviation by which the channels of an image are normalized.",
        of={
            "auto": "those that the weights were trained with",
            "imagenet": "those of ImageNet",
            "unit": "0 and 1, so that the network gets pixels in 0 … 1",
        },
    ),
    final_norm=Choice(
        "auto",
        "Whether the head reads the features of a ViT or ConvNeXt after the last LayerNorm.",
        of={"auto": "as the papers' code does for this backbone and head", "yes": "after it", "no": "before it"},
    ),
)

PROMPTS = section(
    "Learned tokens that are added to the tokens of a frozen ViT.",
    kind=Choice(
        "none",
        "Which prompts the backbone gets: deep is VPT-deep, one set per block; shallow is VPT-shallow and GateVPT, "
        "one set that passes through all blocks; e2vpt is E2VPT, deep prompts with additional keys and values, which "
        "can be pruned; group is ML-VPT's, deep prompts with one set per label group and side.",
        of=PROMPTS_OF_KIND,
    ),
    count=Integer(30, "For deep, shallow and e2vpt: the number of prompts per block.", least=0, most=10_000),
    project=Integer(
        0,
        "Width in which prompts are learned before a linear layer brings them to the backbone's; 0 learns them in the "
        "backbone's width without that layer.",
        least=0,
    ),
    dropout=Number(
        0.0, "Probability that an entry of a prompt is dropped in training, drawn per image.", least=0, most=1
    ),
    gated=Flag(
        False,
        "For shallow: a learned gate per block mixes the prompts before and after it, as in GateVPT.",
    ),
    gate_init=Number(10.0, "For gated prompts: gates start at sigmoid(−gate_init).", least=ANY),
    learn_temperature=Flag(False, "For shallow: learn a temperature of the attention per block, as in GateVPT."),
    key_values=Integer(10, "For e2vpt: the number of additional keys and values per block.", least=0, most=10_000),
    share_key_values=Flag(True, "For e2vpt: use one tensor for the additional keys and values."),
    pruning=Choice(
        "none",
        "For e2vpt: the masks over prompts and their segments that --mode=prune works with.",
        of={
            "none": "no masks",
            "learned": "trainable masks, to measure the importance of prompts and segments",
            "fixed": "masks with the values of kept_tokens and kept_segments",
        },
    ),
    kept_tokens=Text(
        "", "For pruning=fixed: a 1 (kept) or 0 (pruned) per prompt, such as 1101; if it is empty, all are kept."
    ),
    kept_segments=Texts(
        (),
        "For pruning=fixed: a 1 (kept) or 0 (pruned) per segment, one text of 16 per prompt; if it is empty, all are "
        "kept.",
    ),
    pruned=Choice(
        "absent",
        "For pruning=fixed: the effect of pruning a prompt.",
        of={"absent": "it is removed (paper)", "zeroed": "it is a zero vector that is still attended to (code)"},
    ),
    sides=Choice(
        "both",
        "For group: which groupings of the labels have prompts.",
        of={
            "both": "co-occurrence (CO) and discriminative (DC) groups: ML-VPT",
            "co": "co-occurrence groups only: VPT-CO",
            "dc": "discriminative groups only: VPT-DC",
        },
    ),
    num_groups=Integer(5, "For group: the number of label groups per side.", above=0, most=1_000),
    per_group=Integer(3, "For group: the number of prompts, and of experts, per label group.", above=0, most=1_000),
    attention_mask=Choice(
        "all_prompts",
        "For group: which prompts may attend to which.",
        of={
            "none": "all to all",
            "all_prompts": "each to itself only (code)",
            "cross_group": "those of one group to one another (paper)",
        },
    ),
    groups=Text(
        "computed",
        "Where the label groups come from: computed clusters the training labels, published takes the authors' groups, "
        'and anything else is a .json file {"co": [...], "dc": [...]}.',
    ),
)

MODEL = section(
    "The model: a backbone, prompts inside it, and a head on top.",
    dtype=Choice(
        "auto",
        "Type of the matrix products; parameters that train stay in float32.",
        of={
            "auto": "bfloat16 on a GPU or TPU, float32 on a CPU; a resumed run keeps its type",
            "float32": "float32",
            "bfloat16": "bfloat16",
        },
    ),
    remat=Flag(False, "Recompute the blocks of the backbone in the backward pass: less memory, more time."),
    frozen_dtype=Choice(
        "auto",
        "Type in which frozen weights are stored; bfloat16 halves their memory.",
        of={
            "auto": "bfloat16 if products have this type in training and in evaluation, otherwise float32",
            "float32": "float32",
            "bfloat16": "bfloat16",
        },
    ),
    matmul_precision=Choice(
        "default",
        "Precision of float32 matrix products on a TPU or GPU, the setting jax_default_matmul_precision of JAX.",
        of={"default": "the device's fastest", "high": "three bfloat16 passes on a TPU", "highest": "full float32"},
    ),
    backbone=BACKBONE,
    prompts=PROMPTS,
    adapters=section(
        "Adapters beside the prompts, which declare their own keys: setting one of them, or "
        "--config.model.adapters=NAME, adds the adapter with the defaults of its other keys."
    ),
    head=HEAD,
)
