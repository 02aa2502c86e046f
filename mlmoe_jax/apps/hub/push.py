"""`mlmoe push`: share a trained model on the Hugging Face hub, without the published backbone.

A shared model is a run folder with a model card, and with the values of the selected step instead of checkpoints. It
has no local paths, no images, and no scores of single images.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

from mlmoe_jax.apps.hub.card import write_card
from mlmoe_jax.errors import success
from mlmoe_jax.evaluation.results import write_split_results
from mlmoe_jax.evaluation.stored_run import StoredRun
from mlmoe_jax.pretrained.hub_models import require_token, upload_model
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.share import write_shared_model
from mlmoe_jax.runs.shared_model import CARD, FILES
from mlmoe_jax.runtime.hub import Address, parse_address
from mlmoe_jax.runtime.progress import megabytes
from mlmoe_jax.runtime.storage import atomic_folder, require_new
from mlmoe_jax.runtime.table import Outcome


def push(
    folder: RunFolder,
    repository: str,
    *,
    revision: str = "",
    private: bool = False,
    license_name: str = "",
    output: str | None = None,
) -> Outcome:
    """Upload the model of a run to the Hugging Face hub, or only write the files of the upload to a new folder.

    The exit code is 3 if the newest checkpoint is damaged and an older checkpoint was used.

    Args:
      repository: the repository on the hub, USER/NAME.
      revision: the branch to upload to, which is created if it is missing; "" = main.
      private: whether only the owner can see the repository.
      license_name: a license identifier of the hub, such as apache-2.0, for the model card; "" = not chosen.
      output: path of a new folder for the files. If it is given, nothing is uploaded.

    Raises:
      UserError: `repository` is not USER/NAME, the run has no results or no trained values, `output` exists, the token
        of the hub is missing, or the hub refuses the upload or cannot be reached.
    """
    address = parse_address(f"{repository}@{revision}" if revision else repository)
    target = require_new(output) if output else None
    if target is None:
        require_token()
    folder.require_model()
    StoredRun(folder).require_results()  # checked before anything that takes time
    with tempfile.TemporaryDirectory() as temporary:
        path = target or Path(temporary) / "model"
        with atomic_folder(path) as partial:
            outdated = write_shared(folder, RunFolder(partial), address, license_name)
        size = megabytes(sum(file.stat().st_size for file in path.iterdir()))
        if target is None:
            line = f"{address}: {size}; {upload_model(path, address, list(FILES), private=private)}"
        else:
            line = f"{size} written to {target}, and nothing was uploaded; leave --output out to upload it"
    return Outcome([line], exit_code=success(outdated))


def write_shared(folder: RunFolder, target: RunFolder, address: Address, license_name: str) -> bool:
    """Write the files of a shared model to the existing folder `target`, with the card for `address`, see `push`.

    Returns the result of `write_shared_model`. Raises UserError if the run has no results, or under the conditions of
    `open_run`.
    """
    results = {split: replace(entry, scores="") for split, entry in StoredRun(folder).require_results().items()}
    outdated = write_shared_model(folder, target)
    write_split_results(target, results, keep_others=False)
    target.write_text(CARD, write_card(folder, target, address, license_name))
    return outdated
