"""What an exported model says about itself, for programs and for people."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

import jax

from mlmoe_jax.apps.export.catalog import ExportTarget
from mlmoe_jax.inference.predict import Predictor
from mlmoe_jax.runtime.version import __version__

_PREPROCESS = ("resize", "crop_fraction", "exif", "reduced_decoding")  # keys of config.data


def describe(predictor: Predictor, kind: str, target: ExportTarget) -> dict[str, Any]:
    """Return labels, thresholds (infinity = never), preprocessing, and the settings of the model, without local paths.

    kind, target: the format of the export.
    """
    run, size = predictor.run, predictor.run.preprocess.image_size
    return {
        "format": kind,
        "made_with": {"mlmoe_jax": __version__, "jax": jax.__version__},
        "input": {"name": "image", "type": "uint8", "shape": ["B", size, size, 3], "channels": "RGB"},
        "output": {"name": "probability", "type": "float32", "shape": ["B", len(predictor.names)]},
        "labels": list(predictor.names),
        "thresholds": predictor.thresholds.tolist(),
        "preprocess": {
            "image_size": size,
            "mean": list(run.preprocess.mean),
            "std": list(run.preprocess.std),
            **{key: run.config.data[key] for key in _PREPROCESS},
        },
        "trained": {"step": run.step, "kind": run.notes.get("kind", "selected")},
        "model": _without_folders(run.config.model.to_dict()),
        **target.about,
    }


def _without_folders(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings in which the path of a file is its name."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return _without_folders(value)
        return PurePath(value).name if isinstance(value, str) and "/" in value else value

    return {key: plain(value) for key, value in settings.items()}


_README = """# An exported multi-label image classifier

{name}, exported from a run of mlmoe_jax {version}. It takes `image`, uint8 [B,{size},{size},3] in RGB with any number
of images B, and returns `probability`, float32 [B,{labels}]. Mean and standard deviation are applied inside.

| file | content |
|---|---|
{files}
| `model.json` | labels, thresholds (null = never assigned), preprocessing of image files, settings of the model |
| `load.py` | reads image files and labels them; it needs nothing of mlmoe_jax |

```bash
{install}
python load.py photo.jpg
```

```python
from load import Model

model = Model()
[scores] = model([model.read("photo.jpg")])
print([label for label, score, least in zip(model.labels, scores, model.thresholds) if score >= least])
```
"""


def readme(description: dict[str, Any], target: ExportTarget) -> str:
    """Return the text of README.md for an exported folder."""
    model = description["model"]
    return _README.format(
        name=f"Head `{model['head']['kind']}` on the backbone `{model['backbone']['name']}`",
        version=description["made_with"]["mlmoe_jax"],
        size=description["preprocess"]["image_size"],
        labels=len(description["labels"]),
        files="\n".join(f"| `{name}` | {text} |" for name, text in target.files.items()),
        install=target.install,
    )
