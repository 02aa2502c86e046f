"""One process of a job: the command line with a tiny backbone."""

import sys

from helpers import tiny

from mlmoe_jax.main import main

if __name__ == "__main__":
    tiny.use_vit()
    sys.exit(main(sys.argv[1:]))
