"""Label Studio: tasks with annotations or predictions, and the labeling configuration of a project.

Its exports JSON and JSON-MIN are read. `data.image_column` is the key of the image in the data of a task, and
`data.label_column` the name of the Choices. Choices with the name of an attribute have its values. Cancelled
annotations are skipped. If some annotations of an image are marked as ground truth, only these count. A label on which
the annotations differ is unknown.

An address /data/local-files/?d=PATH is the image PATH below `data.images`, and /data/upload/… the image upload/…
An image that is not there, or has another address, is the only file below `data.images` with its name. The eight digits
before the name of an upload may be left out.
"""

import io
import itertools
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.etree import ElementTree

from ml_collections import ConfigDict

from mlmoe_jax.data.image_search import list_files
from mlmoe_jax.data.label_codes import POSITIVE, UNKNOWN
from mlmoe_jax.data.labels.name_vectors import read_classes
from mlmoe_jax.data.names import find_name
from mlmoe_jax.data.sources.labeling_formats import Format, LabelEntry, LabelFile, group_values
from mlmoe_jax.data.sources.rows import SPLIT_COLUMN, ImageRow, LabelRows, Listing
from mlmoe_jax.data.usage import Usage
from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.files import damage_explained, find_file, read_bytes, read_text
from mlmoe_jax.runtime.formats import parse_xml
from mlmoe_jax.runtime.storage import OutputTarget, open_output
from mlmoe_jax.runtime.text import abbreviate, compose, quantity

Json = Mapping[str, Any]  # a task, an annotation or a result
LOCAL_FILES, UPLOADS = "/data/local-files", "/data/upload/"
_UPLOADED = re.compile(r"^upload/(.*/)?[0-9a-f]{8}-")  # the eight digits are drawn by Label Studio
IMAGE, CHOICES = "image", "labels"  # the names in our labeling configuration, and defaults of the config keys


# ---------------------------------------------------------------------------------------------------- images of tasks
def read_address(address: str) -> str:
    """Return the path of an image below the folder of the images; UserError unless it is a file of Label Studio."""
    parts = urlsplit(address)
    if parts.path.rstrip("/") == LOCAL_FILES and (paths := parse_qs(parts.query, errors="surrogateescape").get("d")):
        return paths[0]
    if parts.path.startswith(UPLOADS):
        return unquote(parts.path.removeprefix("/data/"), errors="surrogateescape")
    if parts.scheme or parts.netloc:
        raise UserError(f"the image {address[:100]} is not a local file of Label Studio; use a local storage there")
    return address


def _find_images(addresses: Iterable[str], given: Listing) -> dict[str, str]:
    """Return address -> path of its image, and note in the account how many are found by their names.

    Raises UserError if an image at an address outside of Label Studio is not found.
    """
    images, lost, outside = {}, {}, set()
    for address in dict.fromkeys(addresses):
        try:
            images[address] = path = read_address(address)
        except UserError:
            outside.add(address)
            path = unquote(urlsplit(address).path)
        if address in outside or not os.path.lexists(find_file(given.folder / path)):
            lost[address] = path
    found = _find_by_name(lost, given.folder) if lost else {}
    if wrong := [address for address in outside if address not in found]:
        raise UserError(
            f"{given.path} has {quantity(len(wrong), 'image')} at addresses such as {min(wrong)[:100]}, and "
            f"{given.folder} does not have one file of that name; download them there, or use a local storage in "
            "Label Studio"
        )
    if found:
        shown = abbreviate(list(found.values()), 3)
        given.usage.notes.append(f"has {quantity(len(found), 'image')} found by name, not by address: {shown}")
    return images | found


def _find_by_name(lost: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return address -> the only file in a folder with the name of its path in `lost`, which no other address has."""
    files = defaultdict(list)
    for file in list_files(folder):
        files[_stored_name(file)].append(file)
    names = {}
    for address, path in lost.items():
        name = _stored_name(path)
        names[address] = name if name in files else _stored_name(_UPLOADED.sub("", path))
    counts = Counter(names.values())
    return {address: files[name][0] for address, name in names.items() if counts[name] == len(files[name]) == 1}


def _stored_name(path: str) -> str:
    """Return the name of a file as Label Studio (Django) writes the name of an upload."""
    return re.sub(r"[^-\w.]", "", os.path.basename(compose(path)).strip().replace(" ", "_"))


# ------------------------------------------------------------------------------------------------------------- reading
def _read(given: Listing) -> LabelRows:
    path, key = given.path, given.config.image_column
    controls = (given.config.label_column, *given.attributes.values)
    tasks = _read_tasks(path, key)
    images = _find_images((data[key] for _, data in tasks), given)
    splits: dict[str, str | None] = {}
    annotations = defaultdict(list)  # of each image, which several tasks may show
    for task, data in tasks:
        image = images[data[key]]
        split = data.get(find_name(data, SPLIT_COLUMN))
        if splits.setdefault(image, split) != split:
            raise UserError(f"{path} gives {image} the splits {splits[image]} and {split}; correct one of them")
        annotations[image] += _list_annotations(task, controls)
    results = [result for annotation in itertools.chain(*annotations.values()) for result in annotation["result"] or ()]
    named = {result["from_name"] for result in results if result.get("type") == "choices"}
    if named and named.isdisjoint(controls):
        _require_control(path, controls[0], named)
    rows = [_make_row(image, split, annotations[image], controls) for image, split in splits.items()]
    _note_unread(given.usage, results, rows, controls)
    return rows, None


def _read_tasks(path: Path, key: str) -> list[tuple[Json, Json]]:
    """Return the tasks of an export and the data of each; UserError if a task has no image under `key`."""
    tasks = [(task, task.get("data", task)) for task in json.loads(read_text(path))]  # in JSON-MIN, they are one
    if other := next((data for _, data in tasks if key not in data), None):
        raise UserError(
            f"a task of {path} has {abbreviate(sorted(other))}, not {key}; set data.image_column to its image"
        )
    return tasks


def _note_unread(usage: Usage, results: Sequence[Json], rows: Sequence[ImageRow], controls: Sequence[str]) -> None:
    """Note the results of other tags than `controls`, and the rows with unknown labels, in an account."""
    unused = [result for result in results if not _is_chosen(result, controls)]
    if kinds := sorted({f"{result.get('from_name')} ({result.get('type')})" for result in unused}):
        count = quantity(len(unused), "result")
        tags = f"{count} of tags other than {', '.join(controls)}"
        usage.notes.append(f"has {tags}, which are not used: {abbreviate(kinds)}")
    if disputed := [row.image for row in rows if row.labels and UNKNOWN in row.labels.values()]:
        count = quantity(len(disputed), "image")
        usage.notes.append(
            f"has {count} with labels that are unknown, since annotations differ: {abbreviate(disputed, 3)}"
        )


def _is_chosen(result: Json, controls: Sequence[str]) -> bool:
    """Return whether a result has the choices of one of the <Choices> tags `controls`."""
    return result.get("type") == "choices" and result["from_name"] in controls


def _list_annotations(task: Json, controls: Sequence[str]) -> list[Json]:
    """Return the annotations of a task that are not cancelled, in the form of JSON also for a JSON-MIN export."""
    if "data" in task:
        return [annotation for annotation in task.get("annotations", ()) if not annotation.get("was_cancelled")]
    if task.get("annotation_id") is None:
        return []
    results = [
        {"type": "choices", "from_name": name, "value": value}
        for name, value in task.items()
        if name in controls or (isinstance(value, dict) and "choices" in value)
    ]
    return [{"result": results}]


def _read_names(value: Any) -> set[str]:
    """Return the label names in the JSON value of a <Choices> tag, which may be one name, a list or empty."""
    if isinstance(value, dict):
        return _read_names(value["choices"])
    return set().union(*map(_read_names, value)) if isinstance(value, list) else {value} - {None, ""}


def _make_row(image: str, split: str | None, annotations: Sequence[Json], controls: Sequence[str]) -> ImageRow:
    """Return the row of an image. A label is positive if all annotations have it, and unknown if only some have it.

    If some annotations are marked as ground truth, all others are ignored. An image without annotations counts as not
    labeled. `controls` are the Choices of the labels, then those of attributes.
    """
    truths = [annotation for annotation in annotations if annotation.get("ground_truth")]
    chosen = [
        {
            name if result["from_name"] == controls[0] else f"{result['from_name']}: {name}"
            for result in annotation["result"] or ()
            if _is_chosen(result, controls)
            for name in _read_names(result["value"])
        }
        for annotation in truths or annotations
    ]
    if not chosen:
        return ImageRow(image, None, split=split)
    everywhere = set.intersection(*chosen)
    labels = {label: POSITIVE if label in everywhere else UNKNOWN for label in sorted(set.union(*chosen))}
    return ImageRow(image, labels, split=split)


class Control(NamedTuple):
    """A <Choices> tag of a labeling configuration, in which annotators choose labels.

    Attributes:
      image: name of the <Image> tag to which the choices belong.
      image_key: key of the image in the data of a task.
      values: the values of the choices as annotations store them, in order.
    """

    image: str
    image_key: str
    values: Sequence[str]


def read_controls(labeling_config: bytes) -> dict[str, Control]:
    """Return the <Choices> tags of a labeling configuration: name of the tag -> `Control`.

    If a choice has an alias, annotations store the alias as its value. Call the function inside
    `files.damage_explained`, because a damaged configuration raises exceptions of any type.
    """
    view = parse_xml(io.BytesIO(labeling_config))
    keys = {image.attrib["name"]: image.attrib["value"].removeprefix("$") for image in view.iter("Image")}
    controls = {}
    for choices in view.iter("Choices"):
        image = choices.attrib["toName"]
        if image in keys:
            values = [choice.get("alias") or choice.attrib["value"] for choice in choices.iter("Choice")]
            controls[choices.attrib["name"]] = Control(image, keys[image], list(dict.fromkeys(values)))
    return controls


def _require_control(path: Path, control: str, controls: Iterable[str]) -> None:
    if control not in controls:
        raise UserError(
            f"the choices of {path} are named {abbreviate(sorted(controls))}, not {control}; set data.label_column to "
            "a name"
        )


def _read_classes(path: Path, data_config: ConfigDict) -> Sequence[str]:
    """Return the choices of a labeling configuration (.xml), or the lines of a text file."""
    if path.suffix != ".xml":
        return read_classes(path)
    with damage_explained(path):
        controls = read_controls(read_bytes(path))
        _require_control(path, data_config.label_column, controls)
        classes = controls[data_config.label_column].values
        if not classes:
            raise ValueError(f"it lists no choices of {data_config.label_column}")
        return classes


# ------------------------------------------------------------------------------------------------------------- writing
def prediction(
    labels: Iterable[str],
    scores: Mapping[str, float],
    version: str,
    *,
    values: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    control: str = CHOICES,
    image: str = IMAGE,
) -> dict[str, Any]:
    """Return a prediction for one task of Label Studio, as a JSON-serializable dict.

    Label Studio can sort tasks by the score of the prediction. The score is the least probability of a predicted label.
    If no label is predicted, it is 1 minus the highest probability of a label. `scores` has the probability of all
    labels. `version` is the name of the model, and `values` is from `LabelTree.values`. `control` and `image` are the
    names of the <Choices> tag and of its <Image> tag.
    """
    labels = list(labels)
    score = min((scores[name] for name in labels), default=1 - max(scores.values()))
    return {"model_version": version, "score": round(score, 6), "result": _make_results(labels, values, control, image)}


def _make_results(
    labels: Iterable[str], values: Mapping[str, tuple[str, str]], control: str = CHOICES, image: str = IMAGE
) -> list[dict[str, Any]]:
    chosen = group_values(values.get(label, (control, label)) for label in labels)
    return [
        {"from_name": name, "to_name": image, "type": "choices", "value": {"choices": some}}
        for name, some in chosen.items()
    ]


def labeling_config(names: Iterable[str], values: Mapping[str, tuple[str, str]] = MappingProxyType({})) -> str:
    """Return the XML of a labeling configuration with the labels `names`, for the settings of a project.

    `values` is from `LabelTree.values`. An attribute is a <Choices> tag of its own, of which one is chosen.
    """
    view = ElementTree.Element("View")
    ElementTree.SubElement(view, "Image", name=IMAGE, value=f"${IMAGE}")
    attributes = {attribute for attribute, _ in values.values()}
    for name, some in group_values(values.get(label, (CHOICES, label)) for label in names).items():
        kind = "single" if name in attributes else "multiple"
        choices = ElementTree.SubElement(view, "Choices", name=name, toName=IMAGE, choice=kind)
        for value in some:
            ElementTree.SubElement(choices, "Choice", value=value)
    ElementTree.indent(view)
    return ElementTree.tostring(view, encoding="unicode") + "\n"


def _write(file: LabelFile, entries: Iterable[LabelEntry]) -> str:
    with open_output(OutputTarget(file.path, "json")) as output:
        json.dump([_make_task(entry, file.version, file.values) for entry in entries], output, indent=1)
    configuration = file.path.with_name(f"{file.path.stem}_config.xml")
    with open_output(OutputTarget(configuration, "xml")) as output:
        output.write(labeling_config(file.names, file.values))
    return f"the labeling configuration for the project is {configuration}"


def _make_task(entry: LabelEntry, version: str, values: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    # An address in Label Studio has the path relative to LOCAL_FILES_DOCUMENT_ROOT.
    task: dict[str, Any] = {"data": {IMAGE: f"{LOCAL_FILES}/?d={quote(os.fsencode(entry.image))}"}}
    if entry.scores is not None:
        task["predictions"] = [prediction(entry.labels or (), entry.scores, version, values=values)]
    elif entry.labels is not None:
        task["annotations"] = [{"result": _make_results(entry.labels, values)}]
    return task


LABEL_STUDIO = Format(".json", _read, _write, read_classes=_read_classes)
