"""One process of a job: the command line with a tiny backbone, which imports neither PyTorch nor TensorFlow."""

import sys

from helpers import tiny

from mlmoe_jax.main import main

if __name__ == "__main__":
    tiny.use_vit()
    code = main(sys.argv[1:])
    assert not {"torch", "tensorflow", "tensorflow_datasets"} & set(sys.modules)
    sys.exit(code)
