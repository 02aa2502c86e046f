"""Label Studio: tasks with annotations or predictions, and the labeling configuration of a project.

Its exports JSON and JSON-MIN are read. `data.image_column` is the key of the image in the data of a task, and
`data.label_column` the name of the Choices. Cancelled annotations are skipped. Of several annotations of an image,
those marked as ground truth count if there are any; a label on which the annotations differ is unknown.

An address /data/local-files/?d=PATH is the image PATH below `data.images`, and /data/upload/… the image upload/…
"""

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.etree import ElementTree

from ml_collections import ConfigDict

from mlmoe_jax.data.label_codes import NEGATIVE, POSITIVE, UNKNOWN
from mlmoe_jax.data.sources.formats import Entry, Format, LabelFile
from mlmoe_jax.data.sources.rows import SPLIT_COLUMN, Row
from mlmoe_jax.data.sources.tables import read_classes
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import MOST_DATA, MOST_TEXT, damage_explained, read_bytes
from mlmoe_jax.runtime.formats import xml_events
from mlmoe_jax.runtime.storage import Target, open_target
from mlmoe_jax.runtime.text import some

LOCAL_FILES, UPLOADS = "/data/local-files", "/data/upload/"
IMAGE, CHOICES = "image", "labels"  # the names in our labeling configuration, and defaults of the config keys


# ---------------------------------------------------------------------------------------------------- images of tasks
def address_of(image: str) -> str:
    """Return the address of an image below Label Studio's LOCAL_FILES_DOCUMENT_ROOT."""
    return f"{LOCAL_FILES}/?d={quote(os.fsencode(image))}"


def path_of(address: str) -> str:
    """Return the path of the image of a task below the folder of the images; UserError if it is in no folder."""
    parts = urlsplit(address)
    if parts.path.rstrip("/") == LOCAL_FILES and (places := parse_qs(parts.query, errors="surrogateescape").get("d")):
        return places[0]
    if parts.path.startswith(UPLOADS):
        return unquote(parts.path.removeprefix("/data/"), errors="surrogateescape")
    if parts.scheme or parts.netloc:
        raise UserError(f"the image {address[:100]} is not a local file of Label Studio; use a local storage there")
    return address


# ------------------------------------------------------------------------------------------------------------- reading
def _read(path: Path, data_config: ConfigDict, folder: Path) -> tuple[Iterator[Row], None]:
    tasks = json.loads(read_bytes(path, MOST_DATA))
    if not isinstance(tasks, list):
        raise ValueError("it should hold a list of tasks")
    control, key, controls = data_config.label_column, data_config.image_column, set()
    annotations: dict[str, list[tuple[bool, set[str]]]] = {}
    splits: dict[str, str | None] = {}
    for task in tasks:
        data = task.get("data", task)  # in JSON-MIN, the annotation is beside the data
        if key not in data:
            raise UserError(f"a task of {path} has {some(sorted(data))}, not {key}; set data.image_column to its image")
        image = path_of(data[key])
        splits[image] = data.get(SPLIT_COLUMN)
        of_image = annotations.setdefault(image, [])
        if "data" not in task:
            if task.get("annotation_id") is not None:
                of_image.append((False, _names(task.get(control))))
                choices = {name for name, value in task.items() if isinstance(value, dict) and "choices" in value}
                controls |= choices | ({control} & task.keys())
            continue
        for annotation in task.get("annotations", ()):
            if not annotation.get("was_cancelled"):
                results = [result for result in annotation["result"] or () if result.get("type") == "choices"]
                controls |= {result["from_name"] for result in results}
                names = _names([result["value"] for result in results if result["from_name"] == control])
                of_image.append((bool(annotation.get("ground_truth")), names))
    if controls:
        _require_control(path, control, controls)
    if {type(split) for split in splits.values()} not in ({str}, {type(None)}, set()):
        raise UserError(f"all tasks of {path} or none should have a text under '{SPLIT_COLUMN}'; correct their data")
    return (_row(image, splits[image], of_image) for image, of_image in annotations.items()), None


def _require_control(path: Path, control: str, controls: Iterable[str]) -> None:
    if control not in controls:
        raise UserError(
            f"the choices of {path} are named {some(sorted(controls))}, not {control}; set data.label_column to a name"
        )


def _names(value: Any) -> set[str]:
    """Return the names of a value of the Choices. In JSON-MIN, a single name stands alone, and no name is no value."""
    if isinstance(value, dict):
        return _names(value["choices"])
    return set().union(*map(_names, value)) if isinstance(value, list) else {value} - {None, ""}


def _row(image: str, split: str | None, annotations: Sequence[tuple[bool, set[str]]]) -> Row:
    decisive = [names for is_truth, names in annotations if is_truth] or [names for _, names in annotations]
    if not decisive:
        return Row(0, image, split, {}, UNKNOWN)
    every = set.intersection(*decisive)
    names = sorted(set.union(*decisive))
    return Row(0, image, split, {name: POSITIVE if name in every else UNKNOWN for name in names}, NEGATIVE)


def controls_of(labeling_config: bytes) -> dict[str, tuple[str, str, Collection[str]]]:
    """Return name -> (name of the image, key of the image in the data, values) of the Choices in a configuration.

    The alias of a choice is its value in annotations. Raises an error of any type if the configuration is damaged, see
    `files.damage_explained`.
    """
    keys: dict[str, str] = {}
    choices: dict[str, tuple[str, dict[str, None]]] = {}
    values: dict[str, None] = {}
    for kind, tag, attributes in xml_events([labeling_config]):
        match kind, tag:
            case "start", "Image":
                keys[attributes["name"]] = attributes["value"].removeprefix("$")
            case "start", "Choices":
                values = choices.setdefault(attributes["name"], (attributes["toName"], {}))[1]
            case "start", "Choice":
                values[attributes.get("alias") or attributes["value"]] = None
            case "end", "Choices":
                values = {}  # a Taxonomy has choices too
    return {name: (to, keys[to], names) for name, (to, names) in choices.items() if to in keys}


def _read_classes(path: Path, data_config: ConfigDict) -> tuple[str, ...]:
    """Return the choices of a labeling configuration (.xml), or the lines of a text file."""
    if path.suffix != ".xml":
        return read_classes(path)
    with damage_explained(path):
        controls = controls_of(read_bytes(path, MOST_TEXT))
        _require_control(path, data_config.label_column, controls)
        return tuple(controls[data_config.label_column][2])


# ------------------------------------------------------------------------------------------------------------- writing
def prediction(
    labels: Iterable[str], scores: Mapping[str, float], version: str, *, control: str = CHOICES, image: str = IMAGE
) -> dict[str, Any]:
    """Return a prediction of a task, as JSON values.

    Args:
      labels: the predicted labels.
      scores: label -> probability, for all labels. The score of the prediction, by which tasks can be sorted, is the
        least probability of a predicted label, or without any the probability that the most probable one is absent.
      version: name of the model.
      control: name of the Choices in the labeling configuration.
      image: name of the Image that they are for.
    """
    labels = list(labels)
    score = min((scores[name] for name in labels), default=1 - max(scores.values()))
    return {"model_version": version, "score": round(score, 6), "result": _results(labels, control, image)}


def _results(labels: Iterable[str], control: str = CHOICES, image: str = IMAGE) -> list[dict[str, Any]]:
    choices = {"choices": list(labels)}
    parts = {"from_name": control, "to_name": image, "type": "choices", "value": choices}
    return [parts] if choices["choices"] else []


def labeling_config(names: Iterable[str]) -> str:
    """Return the labeling configuration of a project for these labels, XML to paste into its settings."""
    view = ElementTree.Element("View")
    ElementTree.SubElement(view, "Image", name=IMAGE, value=f"${IMAGE}")
    choices = ElementTree.SubElement(view, "Choices", name=CHOICES, toName=IMAGE, choice="multiple")
    for name in names:
        ElementTree.SubElement(choices, "Choice", value=name)
    ElementTree.indent(view)
    return ElementTree.tostring(view, encoding="unicode") + "\n"


def _write(file: LabelFile, entries: Iterable[Entry]) -> str:
    with open_target(Target(file.path, "json")) as tasks:
        before = "[\n"
        for entry in entries:
            task: dict[str, Any] = {"data": {IMAGE: address_of(entry.image)}}
            if entry.scores is not None:
                task["predictions"] = [prediction(entry.labels or (), entry.scores, file.version)]
            elif entry.labels is not None:
                task["annotations"] = [{"result": _results(entry.labels)}]
            tasks.write(before + json.dumps(task))
            before = ",\n"
        tasks.write("[]\n" if before == "[\n" else "\n]\n")
    configuration = file.path.with_name(f"{file.path.stem}_config.xml")
    with open_target(Target(configuration, "xml")) as text:
        text.write(labeling_config(file.names))
    return f"the labeling configuration for the project is {configuration}"


LABEL_STUDIO = Format(".json", _read, _write, read_classes=_read_classes)
