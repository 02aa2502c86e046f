"""One process of a job: the command line with a tiny backbone, which imports neither PyTorch nor TensorFlow."""

import sys

from helpers import tiny

import mlmoe_jax.training.loop  # noqa: F401
from mlmoe_jax.main import main

if __name__ == "__main__":
    assert not {"sklearn", "altair", "scipy.stats"} & set(sys.modules), "by importing the training"
    tiny.use_vit()
    code = main(sys.argv[1:])
    assert not {"torch", "tensorflow", "tensorflow_datasets"} & set(sys.modules)
    sys.exit(code)
