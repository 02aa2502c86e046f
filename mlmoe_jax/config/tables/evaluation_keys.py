"""Keys of evaluation, thresholds, the report, logs, and pruning."""

from mlmoe_jax.config.keys import ChoiceKey, FlagKey, FractionsKey, IntegerKey, NumberKey, TextKey, section

EVAL_KEYS = section(
    "How splits are evaluated, and which weights a run keeps.",
    batch_size=IntegerKey(256, "Images per device and step; scores do not depend on the number of devices.", above=0),
    dtype=ChoiceKey(
        "same",
        "Type of matrix products in evaluation and prediction.",
        choices={
            "same": "model.dtype",
            "float32": "float32",
            "bfloat16": "bfloat16",
            "float16": "as the authors of ML-VPT evaluate",
        },
    ),
    every_epochs=IntegerKey(1, "Interval between evaluations in training.", above=0, unit="epochs"),
    select_on=ChoiceKey(
        "val",
        "Split that selects the weights of the run.",
        choices={
            "val": "data.val_split",
            "test": "the first test split, as the papers do",
            "none": "no split: the last EMA weights",
        },
    ),
    select_metric=TextKey(
        "mAP",
        "Metric that selects weights, stops training early and chooses in --mode=prune: a name in results.json that "
        "training computes and that is better if higher.",
    ),
    threshold=NumberKey(
        0.5,
        "Lowest probability of a predicted label, for precision, recall, F1 and --mode=predict.",
        least=0,
        most=1,
    ),
    consistent=FlagKey(True, "With data.tree: report scores that agree with it, not independent scores."),
)

METRIC_KEYS = section(
    "Metrics in addition to mAP, precision, recall and F1.",
    preset=ChoiceKey(
        "none", "Paper whose evaluator adds its metrics.", choices=("none", "mlvpt", "q2l", "mlgcn", "asl", "drmoe")
    ),
)

THRESHOLD_KEYS = section(
    "How decision thresholds are fitted, by --mode=thresholds or at the end of training.",
    at_end=FlagKey(False, "Fit when training ends, and report the test splits at the fitted thresholds."),
    split=TextKey(
        "",
        "Split to fit on, never a reported one; if empty, data.val_split, or out_of_fold with train.fit=logistic.",
    ),
    per=ChoiceKey(
        "class", "What has a threshold of its own.", choices={"class": "each class", "global": "all classes together"}
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
    precision=NumberKey(0.9, "For goal=precision: precision to reach on the split.", least=0, most=1),
    miss_rate=NumberKey(
        0.1,
        "For goal=miss_rate: largest expected share of a new image's present labels that is missed.",
        above=0,
        most=0.5,
    ),
)

CALIBRATION_KEYS = section(
    "How --mode=calibrate corrects scores, so that a score of 0.7 means 70 %; it fits on thresholds.split.",
    use=FlagKey(True, "Report corrected scores in --mode=predict, serve and export, not raw probabilities."),
    method=ChoiceKey(
        "platt",
        "Function from raw to corrected scores, one per label, drawn towards one for all labels.",
        choices={
            "temperature": "the logit divided by a temperature",
            "platt": "a linear function of the logit",
        },
    ),
)

REPORT_KEYS = section(
    "Sample images that a run keeps for --mode=report.",
    samples=IntegerKey(0, "Sample images with gates and attention; 0 keeps none.", least=0, most=64),
)

SERVE_KEYS = section(
    "The name of the model of --mode=serve, and the images of Label Studio's tasks.",
    folder=TextKey("", "Folder of the local files of Label Studio, whose images it may name; if empty, none."),
    label_studio=TextKey(
        "", "Label Studio server whose images are fetched with the token $LABEL_STUDIO_API_KEY; if empty, none."
    ),
    name=TextKey("classifier", "Name of the model in the Open Inference Protocol."),
)

LOG_KEYS = section(
    "Where metrics are written besides metrics.jsonl and metrics.csv.",
    tensorboard=FlagKey(True, "Write event files for TensorBoard."),
    mlflow=TextKey("", "Folder or address of MLflow (package mlflow); if empty, none."),
    wandb=TextKey("", "Project of Weights & Biases (package wandb); if empty, none."),
)

_LEVELS = tuple(step / 10 for step in range(1, 10))

PRUNE_KEYS = section(
    "How --mode=prune prunes the prompts of E2VPT.",
    token_levels=FractionsKey(_LEVELS, "Fractions of the prompts to prune, one training each."),
    segment_levels=FractionsKey(
        _LEVELS, "Fractions of each prompt's segments to prune, for every fraction of prompts."
    ),
)
