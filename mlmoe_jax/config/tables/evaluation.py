"""Keys of evaluation, thresholds, the report, logs, and pruning."""

from mlmoe_jax.config.keys import Choice, Flag, Integer, Number, Shares, Text, section

EVAL = section(
    "How splits are evaluated, and which weights a run keeps.",
    batch_size=Integer(
        256, "Number of images per device and step, so that scores do not depend on the number of devices.", above=0
    ),
    dtype=Choice(
        "same",
        "Type of the matrix products in evaluation and prediction.",
        of={
            "same": "that of training, model.dtype",
            "float32": "float32",
            "bfloat16": "bfloat16",
            "float16": "float16, in which the authors of ML-VPT evaluate",
        },
    ),
    every_epochs=Integer(1, "Interval between two evaluations during training.", above=0, unit="epochs"),
    select_on=Choice(
        "val",
        "Which split selects the weights that the run keeps.",
        of={
            "val": "data.val_split",
            "test": "the first test split, as the papers do",
            "none": "no split: the run keeps the last EMA weights",
        },
    ),
    select_metric=Text(
        "mAP",
        "Metric of that split by which the best weights are selected, training stops early, and --mode=prune chooses: "
        "any name in results.json that is computed during training and better if it is higher.",
    ),
    threshold=Number(
        0.5,
        "A label is predicted if its probability is at least this: for precision, recall, F1 and --mode=predict.",
        least=0,
        most=1,
    ),
)

METRICS = section(
    "Metrics in addition to mAP, precision, recall and F1.",
    preset=Choice(
        "none",
        "Which paper's own evaluator adds its metrics.",
        of=("none", "mlvpt", "q2l", "mlgcn", "asl", "drmoe"),
    ),
    top_k=Integer(3, "Number of labels per image that mAP@k and the metrics @topk return.", above=0),
)

THRESHOLDS = section(
    "How decision thresholds are fitted, by --mode=thresholds or at the end of training.",
    at_end=Flag(
        False, "Fit at the end of training too, so that the results have the test splits at the fitted thresholds."
    ),
    split=Text(
        "",
        "Split to fit on, which must not be one that results are reported on; if it is empty, data.val_split, or "
        "out_of_fold with train.fit=logistic.",
    ),
    per=Choice(
        "class", "Whether every class has its own threshold.", of={"class": "one per class", "global": "one for all"}
    ),
    goal=Choice(
        "f1",
        "Goal that a threshold is fitted to.",
        of={"f1": "the largest F1", "precision": "the lowest threshold that reaches thresholds.precision"},
    ),
    precision=Number(
        0.9,
        "For goal=precision: the fraction of predicted labels that must be correct on the split.",
        least=0,
        most=1,
    ),
)

REPORT = section(
    "Sample images that a run keeps for --mode=report.",
    samples=Integer(
        0, "Number of sample images that are kept with their gates and attention; 0 keeps none.", least=0, most=64
    ),
)

SERVE = section(
    "Limits of --mode=serve.",
    images=Integer(32, "Largest number of images per request; with more, its status is 400.", above=0, most=1000),
    megabytes=Integer(16, "Largest size of a request in MiB; if it is larger, its status is 413.", above=0, most=1000),
    megapixels=Number(50.0, "Largest number of pixels per image, in millions; others are not read.", above=0, most=150),
)

LOG = section(
    "Where metrics are written in addition to metrics.jsonl and metrics.csv in the run folder.",
    tensorboard=Flag(True, "Write event files for TensorBoard."),
    wandb=Text("", "Project of Weights & Biases to log to, with the package wandb; if it is empty, there is none."),
)

_LEVELS = tuple(step / 10 for step in range(1, 10))

PRUNE = section(
    "How --mode=prune prunes the prompts of E2VPT.",
    token_levels=Shares(_LEVELS, "Fractions of the prompts to prune, with one training per fraction."),
    segment_levels=Shares(
        _LEVELS,
        "Fractions of each prompt's segments to prune, combined with every fraction of prompts.",
    ),
    importance=Choice(
        "signed",
        "How the importance of a prompt or segment is measured on the gradients of its mask.",
        of={"signed": "by their mean (code)", "absolute": "by the mean of their absolute values (paper)"},
    ),
)
