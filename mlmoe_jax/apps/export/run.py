"""`mlmoe export`: a run in a format that other programs read."""

import inspect
import runpy
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

import mlmoe_jax.config as configuration
from mlmoe_jax.apps.export import standalone
from mlmoe_jax.apps.export.merge import merge_run
from mlmoe_jax.apps.export.program import Program, image_shape, outputs_of, program_of, require_equal
from mlmoe_jax.apps.export.quantize import calibration_images, parts
from mlmoe_jax.apps.export.targets import (
    ALWAYS,
    FEATURES,
    MAP,
    OFFICIAL,
    PROBABILITY,
    TARGETS,
    TEMPLATES,
    Export,
    ExportTarget,
)
from mlmoe_jax.config.table import KEYS, keys_read
from mlmoe_jax.errors import UserError, reason_of, success
from mlmoe_jax.inference.predictor import Predictor
from mlmoe_jax.models.build import backbone_shape
from mlmoe_jax.models.contracts import Head
from mlmoe_jax.models.heads.catalog import head_class
from mlmoe_jax.pretrained.official import CHECKPOINT_SUFFIXES
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.restore import BEST, Run
from mlmoe_jax.runtime.formats import dump_json
from mlmoe_jax.runtime.keys import KeyValues
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.storage import atomic_folder, require_new
from mlmoe_jax.runtime.table import Outcome
from mlmoe_jax.runtime.version import __version__

# The least correlation of the probabilities of a calibrated program with the probabilities of the run: 0.998 on
# EfficientNet-Lite0, and 0.973 where one scale per tensor, not per channel, lost 3.5 points of mAP.
_SIMILAR = 0.99
_IMAGES = 250  # the default number of images of a calibrated program
_GUARD = '\n\nif __name__ == "__main__":'
_README = """# An exported multi-label image classifier

{name}, exported from a run of mlmoe_jax {version}. It takes `image`, uint8 [B,{size},{size},3] in RGB with any number
of images B, and returns {outputs}. Mean and standard deviation are applied inside.

| file | content |
|---|---|
{files}
| `model.json` | labels, thresholds (null = never assigned), attributes, preprocessing, settings of the model |
| `load.py` | reads image files and labels them, without mlmoe_jax |

```bash
{install}
python load.py photo.jpg
```

```python
from load import Model

model = Model()
[scores] = model([model.read("photo.jpg")])
print([model.labels[k] for k in model.assign(scores)])
```
"""


def export_run(
    folder: RunFolder,
    output: str,
    kind: str | None,
    overrides: KeyValues = (),
    *,
    checkpoint: str = BEST,
    include_frozen: str = ALWAYS,
    merge: bool = False,
    template: str | None = None,
    outputs: str = PROBABILITY,
    images: Sequence[str] = (),
    count: int | None = None,
) -> Outcome:
    """Export a run to a file or a folder, and return a line to print.

    An exported program is first written to a temporary folder. The folder is renamed to `output` only if the program
    and the run give nearly equal outputs. The exit code is 3 if the newest checkpoint is damaged.

    Args:
      output: a file or a folder, depending on the format.
      kind: a format, a key of TARGETS; None = `official` if `output` has the suffix of a checkpoint, otherwise
        UserError.
      overrides, checkpoint: as in `Predictor.from_run`.
      include_frozen: for safetensors: always (all frozen weights), auto (unpublished frozen weights), or never.
      merge: merge the adapters into the weights of the backbone.
      template: a key of TEMPLATES, whose files are added to the folder of a program; None = no such files.
      outputs: the names of the outputs of a program, separated by commas; see `program_of`.
      images: for a calibrated format: files, folders and lists as in image_list.py, used instead of training images.
      count: for a calibrated format: the number of images; None = _IMAGES. A fifth of them is kept out of the
        calibration, and used to compare the program with the run.

    Raises:
      UserError: the output exists or cannot be written, a package is missing, the run cannot be opened, or the format
        cannot represent an operation of the model.
    """
    kind = kind or _default_format(output)
    names, sampled = _split_outputs(outputs), bool(images or count)
    target = _target(kind, include_frozen, merge=merge, template=template, outputs=outputs, sampled=sampled)
    path = (target.place or require_new)(output)
    folder.require_model()
    predictor = Predictor.from_run(folder.path, _settings(kind, target, overrides), checkpoint=checkpoint)
    if merge:
        predictor = _merge_adapters(predictor)
    description = describe_model(predictor, kind, names)
    sample = calibration_images(predictor.run, images, count or _IMAGES) if target.calibrated else ()
    export = Export(predictor.run, path, description, include_frozen, sample, names)
    try:
        about = _write_program(export, target, template) if target.load else target.write(export)
    except OSError as error:
        raise UserError(f"cannot write {path}: {reason_of(error)}") from error
    trained = export.description["trained"]
    line = f"{trained['kind']} weights of step {trained['step']} as {kind}; {about}; written to {path}"
    return Outcome([line], exit_code=success(export.run.outdated))


def _merge_adapters(predictor: Predictor) -> Predictor:
    """Return a predictor whose adapters are merged into the weights of the backbone."""
    return Predictor(merge_run(predictor.run), predictor.by_name(predictor.thresholds), predictor.source)


def _split_outputs(outputs: str) -> list[str]:
    """Return the names of outputs, in the order of --help. Raises UserError for other names and without probability."""
    names, known = outputs.split(","), (PROBABILITY, FEATURES, MAP)
    if len({*names}) < len(names) or not {PROBABILITY} <= {*names} <= {*known}:
        raise UserError(f"--outputs={outputs} should be probability, or more names of {','.join(known)}, each once")
    return [name for name in known if name in names]


def _default_format(output: str) -> str:
    """Return OFFICIAL if the path has the suffix of a checkpoint. Raises UserError otherwise: --format is needed."""
    if not output.endswith(CHECKPOINT_SUFFIXES):
        raise UserError(f"--output={output} needs --format; there are {', '.join(TARGETS)}")
    return OFFICIAL


def _target(
    kind: str, include_frozen: str, *, merge: bool, template: str | None, outputs: str, sampled: bool
) -> ExportTarget:
    """Return the target of the format `kind`; UserError if a given flag does not apply to this format.

    `sampled` is whether --images or --calibration-images is given.
    """
    target = TARGETS[kind]
    flags = {
        "--include-frozen": include_frozen != ALWAYS and kind != "safetensors",
        "--merge": merge and (kind == "peft" or include_frozen == "never"),  # it changes frozen weights
        "--template": template and not target.load,
        "--outputs": outputs != PROBABILITY and not target.load,
        "--images and --calibration-images": sampled and not target.calibrated,
    }
    if refused := [name for name, given in flags.items() if given]:
        raise UserError(f"--format={kind} does not take {', '.join(refused)} here; leave it out")
    return target


def _settings(kind: str, target: ExportTarget, overrides: KeyValues) -> KeyValues:
    """Return (key, text) of the required keys, then `overrides`. UserError if one of these changes a required key."""
    needs = dict(target.needs)
    if not target.load:
        needs["calibration.use"] = "false"  # a file of tensors does not correct scores
    for key, value in overrides:
        if key in needs and value.lower() != needs[key]:
            raise UserError(f"--format={kind} needs {key}={needs[key]}, not {value}; leave --config.{key} out")
    return [*(item for item in needs.items() if item not in overrides), *overrides]


def _write_program(export: Export, target: ExportTarget, template: str | None) -> str:
    status("tracing and converting")
    with atomic_folder(export.path) as partial:
        about = target.write(replace(export, path=partial))
        description = dump_json(export.description, indent=2) + "\n"
        texts = {"model.json": description, "load.py": loader(target), "README.md": readme(export.description, target)}
        if template:
            packages = shlex.split(target.install)[2:]  # after `pip install`
            texts |= TEMPLATES[template](export.description, packages, texts["README.md"])
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")  # which load.py and Spaces read, whatever the locale
        status("comparing with the run")
        program = runpy.run_path(str(partial / "load.py"))["Model"](partial)
        if target.calibrated:
            difference = _similarity(export, program.outputs)
        else:
            difference = require_equal(export.run, program.outputs, export.outputs)
        size = sum(file.stat().st_size for file in partial.iterdir())
    return f"{about}; {size / 1e6:,.1f} MB, {difference}"


def _similarity(export: Export, program: Program) -> str:
    """Compare a calibrated program with the run, on the sample images that were not used for the calibration.

    Returns the correlation and the absolute differences of each output as text. UserError if a correlation is below
    _SIMILAR.
    """
    images = np.stack(parts(export.images)[1])
    batches = [program(images[at : at + 8]) for at in range(0, len(images), 8)]
    texts = []
    for name, expected in outputs_of(export.run, images, export.outputs).items():
        found = np.concatenate([batch[name] for batch in batches])
        difference = np.abs(found - expected)
        with np.errstate(invalid="ignore"):  # nan if all values are equal
            correlation = np.corrcoef(expected.ravel(), found.ravel())[0, 1]
        if not correlation >= _SIMILAR:
            raise UserError(
                f"{name} of the exported program has a correlation of {correlation:.3f} with {name} of the run, and "
                f"{_SIMILAR} is the least, so it was not written; export it with --format=onnx"
            )
        texts.append(
            f"{name} has a correlation of {correlation:.4f} and differs by {difference.mean():.1e} on average and "
            f"{difference.max():.1e} at most"
        )
    return f"on {len(images):,} other images, {', '.join(texts)}"


def loader(target: ExportTarget) -> str:
    """Return the text of load.py: the source of standalone.py with `target.load` inserted as `load_program`."""
    before, guard, after = Path(standalone.__file__).read_text().partition(_GUARD)
    return f"{before}\n\n{inspect.getsource(target.load)}\n\nload_program = {target.load.__name__}\n{guard}{after}"


# ------------------------------------------------------------------------------------------------------ description
def describe_model(predictor: Predictor, kind: str, outputs: Sequence[str]) -> dict[str, Any]:
    """Return the content of model.json: labels, thresholds, preprocessing and the model section of the config.

    Raises UserError if the model lacks one of `outputs`.
    """
    run, size = predictor.run, predictor.run.preprocess.image_size
    config = configuration.portable(run.config)
    return {
        "format": kind,
        "made_with": {"mlmoe_jax": __version__, "jax": jax.__version__},
        "input": {"name": "image", "type": "uint8", "shape": ["B", size, size, 3], "channels": "RGB"},
        "outputs": _describe_outputs(run, outputs),
        "labels": list(predictor.names),
        "thresholds": predictor.thresholds.tolist(),
        "attributes": {item.name: list(item.labels) for item in predictor.tree.attributes},
        "calibrated_on": run.scores.calibration.fitted_on or None,
        "preprocess": {
            **describe_images(config),
            "image_size": size,
            "mean": list(run.preprocess.mean),
            "std": list(run.preprocess.std),
        },
        "trained": {"step": run.step, "kind": run.notes.get("kind", "selected")},
        "model": config.model.to_dict(),
    }


def _describe_outputs(run: Run, outputs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return type and shape of each output by name, and of a map also its kind and the pixels from cell to cell."""
    values = jax.eval_shape(program_of(run, outputs), run.definition.shapes(), image_shape(run))
    described = {name: {"type": "float32", "shape": ["B", *values[name].shape[1:]]} for name in outputs}
    if MAP in outputs:
        attends = head_class(run.config).attention is not Head.attention
        kind = "attention" if attends else "activation"
        described[MAP] |= {"kind": kind, "pixels_per_cell": backbone_shape(run.config).patch}
    return described


def describe_images(config: ConfigDict) -> dict[str, Any]:
    """Return the values of `config.data` that say how an image file becomes the input of the model."""
    names = [key.removeprefix("data.") for key in keys_read("image") if KEYS[key].on_resume != "free"]
    return {name: config.data[name] for name in names}


def readme(description: dict[str, Any], target: ExportTarget) -> str:
    """Return the text of README.md for an exported folder."""
    model = description["model"]
    shapes = [f"`{name}`, float32 [{','.join(map(str, one['shape']))}]" for name, one in description["outputs"].items()]
    return _README.format(
        name=f"Head `{model['head']['kind']}` on the backbone `{model['backbone']['name']}`",
        version=description["made_with"]["mlmoe_jax"],
        size=description["preprocess"]["image_size"],
        outputs=" and ".join(shapes),
        files="\n".join(f"| `{name}` | {text} |" for name, text in target.files.items()),
        install=target.install,
    )
