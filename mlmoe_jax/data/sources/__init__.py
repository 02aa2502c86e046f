"""Where images and labels come from: one module a data set, opened by name."""

import difflib

from mlmoe_jax.data.sources.coco import open_coco
from mlmoe_jax.data.sources.voc import open_voc
from mlmoe_jax.data.split import Split
from mlmoe_jax.errors import UserError

NAMES = ("digits", "digits_single", "voc2007", "voc2012", "coco2014")


def open_split(data, split: str) -> Split:
    """Open a split of the data set `data.name`; of `data` (`config.data`), `root` and `keep_empty` are read too.

    Raises UserError for a name that is not among NAMES, and whatever the source raises.
    """
    match data.name:
        case "digits" | "digits_single":
            # scikit-learn takes longer to import than all the rest
            from mlmoe_jax.data.sources.digits import open_scenes, open_single

            return open_scenes(split) if data.name == "digits" else open_single(split)
        case "voc2007" | "voc2012":
            return open_voc(data.root, int(data.name[3:]), split, keep_empty=data.keep_empty)
        case "coco2014":
            return open_coco(data.root, split, keep_empty=data.keep_empty)
    close = difflib.get_close_matches(data.name, NAMES, n=1)
    hint = f"did you mean '{close[0]}'" if close else "set data.name to one of them"
    raise UserError(f"there is no data set '{data.name}' among {', '.join(NAMES)}; {hint}")
