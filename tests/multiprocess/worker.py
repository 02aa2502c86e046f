"""One process of a job: the command line with a tiny backbone; with HANG_AFTER=n it hangs after n batches."""

import os
import sys
import time

from helpers import tiny

from mlmoe_jax.main import main


def hang_after(batches: int) -> None:
    """Make the pipeline of training images hang."""
    from mlmoe_jax.data.pipeline import SkippedImages

    watch = SkippedImages.watch

    def watch_and_hang(self, loader):
        for number, batch in enumerate(watch(self, loader)):
            if number == batches:
                time.sleep(1000)
            yield batch

    SkippedImages.watch = watch_and_hang


if __name__ == "__main__":
    tiny.use_vit()
    if batches := os.environ.get("HANG_AFTER"):
        hang_after(int(batches))
    sys.exit(main(sys.argv[1:]))
