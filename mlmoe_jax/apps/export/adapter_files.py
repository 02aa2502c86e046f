"""Export the LoRA or DoRA of a run, and its classifier, as a folder that PEFT loads onto a model of transformers."""

from __future__ import annotations

import json

from safetensors.numpy import save_file

from mlmoe_jax.apps.export.targets import Export, ExportTarget
from mlmoe_jax.pretrained.peft import CONFIG, TENSORS, peft_files
from mlmoe_jax.runtime.storage import atomic_folder


def _write(job: Export) -> str:
    options, tensors = peft_files(job.run.model(), job.run.config)
    with atomic_folder(job.path) as partial:
        (partial / CONFIG).write_text(json.dumps(options, indent=2) + "\n")
        save_file(tensors, partial / TENSORS, {"format": "pt"})
    what = "with its classifier" if options["modules_to_save"] else "without the head, which transformers lacks"
    return f"{len(tensors)} tensors, {what}"


TARGET = ExportTarget(_write)
