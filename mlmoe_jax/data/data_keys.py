"""Keys of the data set and of augmentation. `sources/catalog.py` has the keys of single data sets."""

from mlmoe_jax.data.sources.catalog import DATA_SETS
from mlmoe_jax.runtime.keys import (
    BY_STEPS,
    AutoIntegerKey,
    ChoiceKey,
    ColorKey,
    FlagKey,
    IntegerKey,
    IntervalKey,
    NumberKey,
    PathKey,
    TextKey,
    TextsKey,
    keys_of,
    others,
    section,
)

_DIFFICULT = {"negative": "as absent", "ignore": "not at all", "positive": "as present"}

DATA_KEYS = section(
    "The data set, and how its images are read.",
    stages=("data",),
    name=ChoiceKey(
        "digits",
        "Data set; tfds:NAME is a data set of TFDS, such as tfds:coco/2014.",
        choices=DATA_SETS,
        required=True,
    ),
    root=PathKey(
        "",
        "Folder of the data set; if empty, $MLMOE_DATA/NAME or data/NAME for a published data set.",
        only_if={"name": others("digits", "digits_single", "synthetic")},
        on_resume="at_start",
    ),
    **keys_of(DATA_SETS, "name"),
    corrections=PathKey(
        "",
        "CSV of mlmoe data --audit with corrections of data.train_split, below data.root or absolute; if empty, none.",
    ),
    tree=PathKey(
        "",
        "YAML file below data.root of labels that imply or exclude one another; if empty, none.",
        stages=("train", "pack"),
    ),
    attributes=PathKey(
        "",
        "Attributes, of whose values an image has one: columns of a table, such as color,weather, or a YAML file below "
        "data.root; if empty, none.",
    ),
    categories=PathKey(
        "",
        "CSV below data.root with the columns label and category: metrics by category, and thresholds for "
        "thresholds.per=category; if empty, none.",
        stages=("train",),
    ),
    train_split=TextKey("train", "Split to train on."),
    val_split=TextKey("val", "Split for selection and early stopping; if empty, none."),
    test_splits=TextsKey(("test",), "Splits evaluated at the end of training."),
    val_fraction=NumberKey(
        0.0,
        "Expected fraction of the training split held out as data.val_split; 0 uses the data set's own split.",
        least=0,
        most=1,
    ),
    split_seed=IntegerKey(
        0, "Seed of the hash of names that holds images out; -1 takes the key seed.", least=-1, most=2**32 - 1
    ),
    join_twins=FlagKey(
        True,
        "Keep images that are nearly equal, such as frames of a clip, together in data.val_fraction and in folds.",
        stages=("train",),
    ),
    image_size=IntegerKey(
        64,
        "Side of the square images of the network.",
        above=0,
        most=8192,
        unit="pixels",
        stages=("image",),
        shared="value",
    ),
    resize=ChoiceKey(
        "square",
        "How an image gets this size, unless augment.geometry says otherwise.",
        choices={
            "square": "resize, whatever the aspect ratio",
            "crop": "resize the short side, then crop the center",
            "clip": "as CLIP's processor: resize the short side by a bicubic filter to this size, then crop the center",
            "pad": "resize the long side, then add a border of data.fill",
        },
        stages=("image",),
        shared="value",
    ),
    crop_fraction=NumberKey(
        0.875,
        "Side of the crop as a fraction of the resized short side.",
        above=0,
        most=1,
        stages=("image",),
        shared="value",
        only_if={"resize": ("crop",)},
    ),
    fill=ColorKey(
        (0.485, 0.456, 0.406),
        "Color of the border; if this default, the mean of the backbone.",
        stages=("image",),
        shared="value",
        only_if={"resize": ("pad",)},
    ),
    reduced_decoding=FlagKey(
        False,
        "Decode large JPEGs at 1/2, 1/4 or 1/8 of their size: faster, but unlike the papers.",
        stages=("image",),
        shared="value",
    ),
    bad_images=ChoiceKey(
        "error",
        "Missing or unreadable images; with batch_norm=trainable, skip leaves out only missing ones.",
        choices={"error": "stop", "skip": "leave out, and list in the run folder"},
        on_resume="reported",
    ),
    truncated=ChoiceKey(
        "refuse",
        "Truncated JPEGs; other formats are always refused.",
        choices={"refuse": "unreadable", "read": "read what is there, the rest gray, as ML-VPT's code does"},
        stages=("image",),
        shared="value",
        on_resume="reported",
    ),
    exif=ChoiceKey(
        "apply",
        "EXIF orientation; mlmoe predict applies it unless this key is set there.",
        choices={"apply": "rotate upright", "ignore": "keep the stored rows, as the published codes do"},
        stages=("image",),
        shared="value",
        on_resume="reported",
    ),
    gray_bits=IntegerKey(
        16,
        "Bits that 16-bit grayscale images use: microscopes and X-ray detectors store 10, 12 or 14.",
        least=8,
        most=16,
        stages=("image",),
        shared="value",
    ),
    difficult_train=ChoiceKey(
        "negative", "How difficult labels count in training.", choices=_DIFFICULT, stages=("train", "pack")
    ),
    difficult_eval=ChoiceKey("negative", "How difficult labels count in metrics.", choices=_DIFFICULT),
    known_positives=PathKey(
        "all",
        "Positives known in training: all, one per image, 0.75 or 0.4 as in published lists, random:SHARE, or a list "
        "(.txt); if not all, every other training label is unknown.",
        stages=("train",),
        shared="record",
    ),
    repeat_factor=NumberKey(
        0.0,
        "Share of images below which a label is rare: images with it are drawn more often, as for LVIS; 0 is off.",
        least=0,
        most=1,
        stages=("train",),
        only_if=BY_STEPS,
    ),
    keep_empty=FlagKey(
        False,
        "Keep images without a positive label in published data sets; own data and chest X-rays always keep them.",
    ),
    cache_features=ChoiceKey(
        "no",
        "Train on features of a frozen backbone, computed once, without augmentation.",
        choices={
            "no": "encode each image in every epoch",
            "float32": "as computed",
            "float16": "half the space, 11 significant bits",
        },
        stages=("train",),
    ),
    workers=AutoIntegerKey(
        AutoIntegerKey.AUTO,
        "Processes that read images; 0 means threads; auto starts processes if threads cannot feed an accelerator, and "
        "one per core for mlmoe pack.",
        least=0,
        stages=("image",),
        on_resume="free",
    ),
    threads=AutoIntegerKey(
        AutoIntegerKey.AUTO,
        "Reading threads per process; auto depends on the cores and the batch size.",
        above=0,
        stages=("image",),
        on_resume="free",
    ),
)


def _jitter(what: str) -> NumberKey:
    doc = f"Strength s of {what} jitter: a factor from 1 − s to 1 + s."
    return NumberKey(0.0, doc, least=0, most=1)


AUGMENT_KEYS = section(
    "Augmentation of training images, in the order of these keys.",
    stages=("train",),
    only_if=BY_STEPS,
    geometry=ChoiceKey(
        "none",
        "How a training image is cropped and resized.",
        choices={
            "none": "as data.resize does",
            "random_resized_crop": "a random part, resized",
            "multi_scale_crop": "one of several sizes and places, as in ML-GCN",
        },
    ),
    crop_scale=IntervalKey(
        (0.08, 1.0), "Smallest and largest fraction of the area.", only_if={"geometry": ("random_resized_crop",)}
    ),
    margin=IntegerKey(
        0,
        "Resize to a square this much larger than data.image_size first; 0 is off, ADD-GCN takes 64.",
        least=0,
        unit="pixels",
        only_if={"geometry": ("multi_scale_crop",)},
    ),
    flip=FlagKey(False, "Flip left to right with probability 1/2."),
    contrast=_jitter("contrast"),
    brightness=_jitter("brightness"),
    saturation=_jitter("saturation"),
    hue=NumberKey(0.0, "Strength s of hue jitter: a turn from −s to s of the color circle.", least=0, most=0.5),
    jitter_order=ChoiceKey(
        "fixed",
        "Order of contrast, brightness, saturation and hue.",
        choices={"fixed": "this order", "random": "drawn per image, as in torchvision's ColorJitter"},
    ),
    cutout=NumberKey(
        0.0,
        "Side of the cutout square as a fraction of the image's; 0 is off, ML-VPT takes 0.5.",
        least=0,
        most=1,
    ),
    randaugment=ChoiceKey(
        "none",
        "RandAugment policy.",
        choices={
            "none": "off",
            "uda": "operations and strengths of ML-VPT's code",
            "standard": "the published policy: two operations of strength 9 of 10",
            "trivial": "TrivialAugment-Wide, which has no settings",
        },
    ),
    erase=NumberKey(0.0, "Probability of random erasing, which puts noise into a rectangle.", least=0, most=1),
    mix=ChoiceKey(
        "none",
        "Mixing of an image and its labels with another image of the batch.",
        choices={
            "none": "off",
            "mixup": "a weighted mean of the images, or of cached features",
            "cutmix": "a rectangle of the other image",
            "both": "one of these two, drawn per step",
            "splicemix": "mosaics of two by two images, appended to the batch, one per four images",
        },
    ),
    splice_consistency=FlagKey(
        False,
        "A binary cross-entropy between the cells of a mosaic and its images (SpliceMix-CL).",
        only_if={"mix": ("splicemix",)},
    ),
    mix_alpha=NumberKey(
        0.4,
        "The share of an image is drawn from Beta(α, α); the CutMix paper takes 1.",
        above=0,
        most=100,
        only_if={"mix": ("mixup", "cutmix", "both")},
    ),
)
