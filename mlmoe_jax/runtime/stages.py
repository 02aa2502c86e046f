"""The stages of the program, which read config keys. `--help` imports this module alone."""

# A command runs some of them, see `apps.cli.commands.Command.stages`.
STAGES = {
    "data": "opens a data set",
    "image": "reads and prepares an image",
    "model": "builds the model; a trained model keeps the key",
    "train": "trains",
    "score": "computes and reports scores",
    "measure": "computes metrics",
    "fit": "fits thresholds",
    "calibrate": "fits the calibration",
    "report": "draws sample images",
    "serve": "serves a model",
    "pack": "writes a data set",
    "prune": "prunes prompts",
    "encode": "encodes label names",
}
