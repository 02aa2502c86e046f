"""Keys of evaluation, metrics, thresholds and the calibration."""

from mlmoe_jax.runtime.keys import BY_STEPS, ChoiceKey, FlagKey, IntegerKey, NumberKey, TextKey, others, section

EVAL_KEYS = section(
    "How splits are evaluated, and which weights a run keeps.",
    stages=("score",),
    batch_size=IntegerKey(
        256, "Images per device and step; scores do not depend on the number of devices.", above=0, on_resume="free"
    ),
    dtype=ChoiceKey(
        "same",
        "Type of matrix products in evaluation and prediction.",
        choices={
            "same": "model.dtype",
            "float32": "float32",
            "bfloat16": "bfloat16",
            "float16": "as the authors of ML-VPT evaluate",
        },
        shared="value",
    ),
    every_epochs=IntegerKey(
        1, "Interval between evaluations in training.", above=0, unit="epochs", stages=("train",), only_if=BY_STEPS
    ),
    select_on=ChoiceKey(
        "val",
        "Split that selects the weights of the run.",
        choices={
            "val": "data.val_split",
            "test": "the first test split, as the papers do",
            "none": "no split: the last EMA weights",
        },
        stages=("train",),
        only_if=BY_STEPS,
    ),
    select_metric=TextKey(
        "mAP",
        "Metric that selects weights, stops training early and chooses in mlmoe prune: a name in results.json that "
        "training computes and that is better if higher.",
        stages=("train", "prune"),
        only_if=BY_STEPS,
    ),
    threshold=NumberKey(
        0.5,
        "Lowest probability of a predicted label, for precision, recall, F1 and mlmoe predict.",
        least=0,
        most=1,
        shared="value",
    ),
    flips=FlagKey(
        False,
        "Score an image by the mean logits of it and its mirror image, also in prediction and exported programs.",
        shared="value",
    ),
    consistent=FlagKey(
        True,
        "Report scores that agree with data.tree, not independent scores.",
        only_if={"data.tree": others("")},
        shared="value",
    ),
)

METRIC_KEYS = section(
    "Metrics in addition to mAP, precision, recall and F1.",
    stages=("measure",),
    on_resume="free",
    preset=ChoiceKey(
        "none", "Paper whose evaluator adds its metrics.", choices=("none", "mlvpt", "q2l", "mlgcn", "asl", "drmoe")
    ),
)

THRESHOLD_KEYS = section(
    "How decision thresholds are fitted, by mlmoe thresholds or at the end of training.",
    stages=("fit",),
    on_resume="free",
    at_end=FlagKey(
        False, "Fit when training ends, and report the test splits at the fitted thresholds.", stages=("train",)
    ),
    split=TextKey(
        "",
        "Split to fit on, never a reported one; if empty, data.val_split, or out_of_fold with train.fit=logistic.",
        stages=("fit", "calibrate"),
    ),
    per=ChoiceKey(
        "class",
        "What has a threshold of its own.",
        choices={
            "class": "each class",
            "category": "the classes of each category of data.categories together",
            "global": "all classes together",
        },
    ),
    goal=ChoiceKey(
        "f1",
        "Goal of a threshold.",
        choices={
            "f1": "the largest F1",
            "precision": "the lowest threshold that reaches thresholds.precision",
            "miss_rate": "the highest threshold with a bound of thresholds.miss_rate, by conformal risk control",
        },
    ),
    precision=NumberKey(0.9, "Precision to reach on the split.", least=0, most=1, only_if={"goal": ("precision",)}),
    miss_rate=NumberKey(
        0.1,
        "Largest expected share of a new image's present labels that is missed.",
        above=0,
        most=0.5,
        only_if={"goal": ("miss_rate",)},
    ),
)

CALIBRATION_KEYS = section(
    "How mlmoe calibrate corrects scores, so that a score of 0.7 means 70 %; it fits on thresholds.split.",
    stages=("calibrate",),
    on_resume="free",
    use=FlagKey(
        True,
        "Report corrected scores in mlmoe predict, serve and export, not raw probabilities.",
        stages=("score",),
        shared="value",
    ),
    method=ChoiceKey(
        "platt",
        "Function from raw to corrected scores, one per label, drawn towards one for all labels.",
        choices={
            "temperature": "the logit divided by a temperature",
            "platt": "a linear function of the logit",
        },
    ),
)
