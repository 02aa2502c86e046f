"""Keys of the data set, of augmentation, and of packing."""

from mlmoe_jax.config.keys import AutoInteger, Choice, Flag, Integer, Interval, Number, Text, Texts, section
from mlmoe_jax.data.sources.open import SOURCES

_DIFFICULT = {"negative": "as absent", "ignore": "not at all", "positive": "as present"}

DATA = section(
    "The data set: its location, its splits, and how its images are read.",
    name=Choice(
        "digits",
        "Name of the data set; tfds:NAME stands for any data set of TFDS, such as tfds:coco/2014.",
        of=SOURCES,
    ),
    root=Text(
        "",
        "Folder of the data set; digits and synthetic need none, and without it a published data set is read from "
        "$MLMOE_DATA/NAME or else data/NAME, where NAME is data.name.",
    ),
    table=Text(
        "{split}.csv",
        "For csv, jsonl and coco_json: the file with the labels, below data.root, in which {split} stands for the name "
        "of the split.",
    ),
    images=Text(
        "",
        "For csv, jsonl and coco_json: the folder below data.root that the paths in the table are relative to; it may "
        "contain {split}.",
    ),
    image_column=Text("image", "For csv and jsonl: the column, or key, that holds the path of the image."),
    label_column=Text(
        "labels",
        "For csv and jsonl: the column, or key, that holds the label names; if it is empty, the table has one column "
        "per class with 1, 0, or nothing for unknown.",
    ),
    labels=Integer(20_000, "For synthetic: the number of labels that its images can show.", above=0),
    separator=Text(";", "For csv: the text between two label names."),
    classes=Text(
        "",
        "For csv, jsonl and vg500: a text file below data.root with one class per line; if it is empty, the classes "
        "are the names in the table.",
    ),
    train_split=Text("train", "Name of the split to train on."),
    val_split=Text("val", "Name of the split for model selection and early stopping; if it is empty, there is none."),
    test_splits=Texts(("test",), "Names of the splits that are evaluated at the end of training."),
    val_fraction=Number(
        0.0,
        "Fraction of the training split that is held out as data.val_split; 0 means that the data set has a validation "
        "split of its own.",
        least=0,
        most=1,
    ),
    split_rule=Choice(
        "stratified",
        "How the images that data.val_fraction holds out are drawn.",
        of={
            "stratified": "each label has about the same share of its images in both parts, and at least one if it has "
            "two (iterative stratification)",
            "random": "regardless of their labels, as before this key existed",
        },
    ),
    split_seed=Integer(
        0,
        "Seed that draws these images, so that runs with different values of seed share them; -1 means seed, as before "
        "this key existed.",
        least=-1,
        most=2**32 - 1,
    ),
    image_size=Integer(64, "Side of the square images that the network gets.", above=0, most=8192, unit="pixels"),
    resize=Choice(
        "square",
        "How evaluation, and training without augment.geometry, bring an image to its final size.",
        of={
            "square": "resize to a square, whatever the aspect ratio",
            "crop": "resize the short side, then crop the center",
        },
    ),
    crop_fraction=Number(
        0.875,
        "For data.resize=crop: the side of the center crop as a fraction of the resized short side.",
        above=0,
        most=1,
    ),
    reduced_decoding=Flag(
        False, "Decode a large JPEG at 1/2, 1/4 or 1/8 of its size, which is faster but differs from the papers."
    ),
    bad_images=Choice(
        "error",
        "Treatment of an image that is missing or unreadable; with model.backbone.batch_norm=trainable, skip leaves "
        "only missing images out of the training.",
        of={"error": "stop with an error", "skip": "leave it out, and list it in the run folder"},
    ),
    truncated=Choice(
        "refuse",
        "Treatment of a JPEG that is cut short; other formats are always refused.",
        of={
            "refuse": "it is unreadable",
            "read": "read what is there and leave the rest gray, as ML-VPT's code does with LOAD_TRUNCATED_IMAGES",
        },
    ),
    exif=Choice(
        "apply",
        "Treatment of the orientation in an image's EXIF data; --mode=predict applies it unless this key is set there.",
        of={"apply": "rotate the image upright", "ignore": "keep the stored rows, as the published codes do"},
    ),
    difficult_train=Choice("negative", "How labels that are marked difficult count in training.", of=_DIFFICULT),
    difficult_eval=Choice("negative", "How labels that are marked difficult count in metrics.", of=_DIFFICULT),
    keep_empty=Flag(
        False,
        "Keep images without any positive label in the published data sets, and those with only difficult labels that "
        "count as absent; the user's own tables and folders always keep them.",
    ),
    cache_features=Choice(
        "no",
        "Whether training reads features of a frozen backbone, computed once and kept in the cache folder, in place "
        "of images, which must then not be augmented.",
        of={
            "no": "the backbone encodes each image in every epoch",
            "float32": "as they are computed, so that results are the same up to rounding",
            "float16": "in half the space, rounded to 11 significant bits",
        },
    ),
    cache=Choice(
        "none",
        "Where training keeps decoded and resized images, which threads then read; not for random_resized_crop, nor "
        "for multi_scale_crop without augment.margin.",
        of={
            "none": "images are decoded whenever they are needed",
            "disk": "in the cache folder, also for later runs on the same files and size",
        },
    ),
    workers=AutoInteger(
        AutoInteger.AUTO,
        "Number of processes that decode, resize and augment images; 0 means threads of the main process, and auto "
        "starts processes only for an accelerator that threads on all cores could not feed; --mode=pack takes one per "
        "core for auto.",
        least=0,
    ),
    threads=AutoInteger(
        AutoInteger.AUTO,
        "Number of reading threads in each of these processes; auto means as many as the cores, the size of a batch "
        "and a few timed images allow.",
        above=0,
    ),
)


def _jitter(what: str) -> Number:
    doc = f"Strength of {what} jitter s, with a factor drawn uniformly from 1 − s to 1 + s."
    return Number(0.0, doc, least=0, most=1)


AUGMENT = section(
    "Augmentation of training images, applied in the order of these keys.",
    geometry=Choice(
        "none",
        "How a training image is cropped and resized.",
        of={
            "none": "as data.resize does it",
            "random_resized_crop": "a random part of the image, resized",
            "multi_scale_crop": "one of several sizes and places, as in ML-GCN",
        },
    ),
    crop_scale=Interval(
        (0.08, 1.0), "For random_resized_crop: the smallest and the largest fraction of the image's area to crop."
    ),
    margin=Integer(
        0,
        "For multi_scale_crop: how much larger than data.image_size the image is resized to a square before the crop; "
        "0 skips this resize, and ADD-GCN takes 64.",
        least=0,
        unit="pixels",
    ),
    flip=Flag(False, "Flip an image left to right with probability 1/2."),
    shift=Number(
        0.0,
        "Largest translation in each direction as a fraction of the side; border pixels are repeated.",
        least=0,
        most=1,
    ),
    contrast=_jitter("contrast"),
    brightness=_jitter("brightness"),
    saturation=_jitter("saturation"),
    hue=Number(
        0.0,
        "Strength of hue jitter s, with a turn drawn uniformly from −s to s of the circle of colors.",
        least=0,
        most=0.5,
    ),
    jitter_order=Choice(
        "fixed",
        "The order of contrast, brightness, saturation and hue.",
        of={"fixed": "this one", "random": "drawn for each image, as in torchvision's ColorJitter"},
    ),
    cutout=Number(
        0.0,
        "Side of the square that cutout covers as a fraction of the image's side; 0 is off, and ML-VPT takes 0.5.",
        least=0,
        most=1,
    ),
    randaugment=Choice(
        "none",
        "Which RandAugment policy is applied.",
        of={
            "none": "no operations",
            "uda": "the operations and strengths of ML-VPT's code",
            "standard": "the published policy",
        },
    ),
    randaugment_ops=Integer(2, "For randaugment=standard: the number of operations per image.", above=0),
    randaugment_magnitude=Integer(9, "For randaugment=standard: the strength of each operation.", least=0, most=10),
)

PACK = section(
    "How --mode=pack stores a data set in shards.",
    short_side=Integer(
        0,
        "Larger images are stored as JPEG with this short side; 0 stores every file unchanged.",
        least=0,
        unit="pixels",
    ),
)
