"""Keys of the trackers to which a training sends its metrics."""

from mlmoe_jax.runtime.keys import BY_STEPS, FlagKey, TextKey, section

LOG_KEYS = section(
    "Where metrics are written besides metrics.jsonl and metrics.csv.",
    stages=("train",),
    on_resume="free",
    shared="default",
    tensorboard=FlagKey(True, "Write event files for TensorBoard.", only_if=BY_STEPS),
    mlflow=TextKey("", "Folder or address of MLflow (package mlflow); if empty, none."),
    wandb=TextKey("", "Project of Weights & Biases (package wandb); if empty, none."),
)
