"""One process of a job: the command line with a tiny backbone, and on request one that hangs in the middle."""

import dataclasses
import os
import sys
import time

from mlmoe_jax.main import main
from mlmoe_jax.models.backbones import catalog

ENTRY = catalog.CATALOG["vit_digits"]
SHAPE = dataclasses.replace(ENTRY.shape, width=16, depth=2, heads=2)


def hang_after(batches: int) -> None:
    """Let reading training pictures come to a standstill."""
    from mlmoe_jax.data.pipeline import SkippedImages

    watch = SkippedImages.watch

    def watch_and_hang(self, loader):
        for number, batch in enumerate(watch(self, loader)):
            if number == batches:
                time.sleep(1000)
            yield batch

    SkippedImages.watch = watch_and_hang


if __name__ == "__main__":
    catalog.CATALOG["vit_digits"] = dataclasses.replace(ENTRY, shape=SHAPE)
    if batches := os.environ.get("HANG_AFTER"):
        hang_after(int(batches))
    sys.exit(main(sys.argv[1:]))
