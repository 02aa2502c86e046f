"""Lists of label names and files of their vectors that are refused."""

from dataclasses import replace

import numpy as np
from helpers.name_vectors import drawn_vectors
from helpers.refusals import CUT, GONE, Refusal, damaged, each
from safetensors.numpy import save_file

from mlmoe_jax.data.labels.name_vectors import read_label_names, read_name_vectors
from mlmoe_jax.data.labels.space import label_space_of, synthetic_label_space

VECTORS = drawn_vectors(("sea", "boat"), 4, projects_from=6)
NAMED, UNNAMED = label_space_of(VECTORS), synthetic_label_space(2, 1)


def of_list(name, content, *says):
    """A list with this content."""

    def make(at):
        (at / "labels.txt").write_bytes(content if isinstance(content, bytes) else content.encode())
        return at / "labels.txt"

    return Refusal(name, make, read_label_names, "{at}/labels.txt", *says)


def written(at, vectors=VECTORS):
    vectors.write(at / "v.safetensors")
    return at / "v.safetensors"


def of_fields(name, *says, **fields):
    """A file of vectors with other attributes."""
    return Refusal(name, lambda at: written(at, replace(VECTORS, **fields)), read_name_vectors, "is damaged", *says)


def of_further(name, *says, space=NAMED, names=("sea", "boat", "sand"), seed=0):
    """Vectors of names for a run, some of which are its labels."""
    return Refusal(name, None, lambda at: space.with_names(drawn_vectors(names, 4, projects_from=6, seed=seed)), *says)


def with_header(at, header):
    save_file(VECTORS.arrays(), at / "v.safetensors", header)
    return at / "v.safetensors"


def of_header(name, header, *says):
    return Refusal(name, lambda at: with_header(at, header), read_name_vectors, *says)


NOT_FINITE = np.array([[np.nan] * 4] * 2, np.float32)

REFUSALS = [
    of_list("an empty list", "", "contains no class names; write one class name per line"),
    of_list("a name twice", "sea\nboat\n sea\tdeep\n", "names the class 'sea' twice"),
    of_list("descriptions without a name", "sea\n\tdeep\n", "has the label '', which is no name"),
    of_list(
        "a control character",
        "sea\x07\n",
        "has the label 'sea\\x07', with a line break or another",
    ),
    of_list("a list in UTF-16", "sea\n".encode("utf-16-le"), "is not UTF-8"),
    Refusal("no list", None, lambda at: read_label_names(at / "labels.txt"), "cannot read {at}/labels.txt"),
    damaged("no vectors", written, "v.safetensors", GONE, read_name_vectors, "cannot read {at}/v.safetensors"),
    damaged("cut vectors", written, "v.safetensors", CUT, read_name_vectors, "{at}/v.safetensors is damaged"),
    of_header("other tensors", {"format": "pt"}, "v.safetensors has no vectors of names; write one with mlmoe encode"),
    of_header("no names", {"mlmoe_jax": "{}"}, "is damaged: it has no 'names'"),
    of_header("a header that is no JSON", {"mlmoe_jax": "{"}, "is damaged"),
    of_fields("more names", "its vectors do not fit its 3 names", names=("a", "b", "c")),
    of_fields("a name twice in a file", "its names are not different", names=("a", "a")),
    of_fields("nan", "its vectors do not fit", vectors=NOT_FINITE),
    of_fields("float64", "its background do not fit", background=np.zeros(4)),
    of_fields("an infinite scale", "its scale is not finite", scale=np.inf),
    of_fields("too few descriptions", "its descriptions do not fit", descriptions=(("a",),)),
    Refusal(
        "a label without a vector",
        None,
        lambda _: VECTORS.for_labels(["sea", "kite", "boat"]),
        "the vectors have no name kite, which the data has as a label; add it",
    ),
    Refusal(
        "a vector without a label",
        None,
        lambda _: VECTORS.for_labels(["sea"]),
        "the vectors have the name boat, which is no label of the data; remove it, or set data.classes",
    ),
    # further names of a run
    of_further(
        "a further name for labels without vectors", "have no vectors of names", space=synthetic_label_space(2, 1)
    ),
    of_further("no further name", "no name that is not a label of the run", names=("sea", "boat")),
    of_further("further names without a label", "the vectors have no name boat", names=("sea", "sand")),
    of_further("further names with other vectors of the labels", "the run has other vectors of its labels", seed=1),
]


@each(REFUSALS)
def test_refusals(case, tmp_path):
    case.check(tmp_path)
