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


def of_lines(listed, line, *says):
    """A list that is refused at a line."""
    return of_list(f"{listed!r}", listed, f"{{at}}/labels.txt line {line} has the label ", *says)


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


FORM, CODE = (
    "which looks like a comment, a heading or a line of another kind of file",
    "which has a number, a code or a translation",
)
SEVERAL, VARIANT = "which looks like several names; write each name alone on a line", "or differs only in case"
OTHER_FILES = {
    FORM: (
        *(
            "dog;cat\n",
            "dog|cat\n",
            "dog,\ncat\n",
            "dog\\ncat\n",
            '[\n  "dog",\n  "cat"\n]\n',
            '{\n "dog": 0\n}\n',
            "item {\n}\n",
        ),
        *(
            "# animals\ndog\n",
            "dog # the pet\n",
            "// animals\ndog\n",
            "label\ndog\n",
            "Class names\ndog\n",
            "Animals:\ndog\n",
        ),
        *(
            "- dog\n- cat\n",
            "* dog\n",
            "• dog\n",
            "[x] dog\n",
            "<labels>\n<label>dog</label>\n",
            "```\ndog\n",
            "| id | name |\n",
        ),
        *("names:\n- dog\n", "photos/a.jpg\nphotos/b.jpg\n", "photos/dog/\n", "https://x.org/dog\n", "/m/01yrx\n"),
        *(
            "☐ dog\n☑ cat\n",
            "> dog\n",
            "**dog**\n",
            "`dog`\n",
            "[dog](x)\n",
            "\\item dog\n",
            "・犬\n",
            "== Pets ==\ndog\n",
        ),
        *("dog，cat\n", "犬、猫\n", "dog · cat\n", "dog • cat\n", "keywords\ndog\n", "name\tdescription\ndog\ta dog\n"),
    ),
    CODE: (
        *(
            "1.dog\n2.cat\n",
            "1) dog\n",
            "0,dog\n1,cat\n",
            "0: dog\n1: cat\n",
            "0 dog\n1 cat\n",
            "0\tdog\n1\tcat\n",
            "c0: dog\n",
        ),
        *(
            "dog,0\ncat,1\n",
            "/a/dog 0\n/c/cat 1\n",
            "dog: 0\n",
            "dog\t5\ncat\t7\n",
            "  1532 dog\n    27 cat\n",
            "dog n02084071\n",
        ),
        *(
            "n02084071 dog\nn02121808 cat\n",
            "n02084071\tdog\n",
            "n02084071,dog\n",
            "1 001.Black_Bird\n2 002.Red_Bird\n",
            "a) dog\nb) cat\n",
            "(1) dog\n",
            "#1 dog\n#2 cat\n",
        ),
        *(
            "dog (5)\ncat (7)\n",
            "dog [5]\n",
            "dog - 5\ncat - 7\n",
            "dog x5\ncat x7\n",
            "dog 91%\ncat 87%\n",
            "dog -> Hund\ncat -> Katze\n",
            "dog = Hund\n",
            "dog: a photo of a dog\ncat: a photo of a cat\n",
            "dog – a pet\ncat – a pet\n",
        ),
    ),
    SEVERAL: ("dog, cat, person\n", "dog\tcat\tperson\n", "dog/cat/person\n", "dog, cat\nperson, car\n"),
    "which looks like a list in JSON or Python": (
        '["dog", "cat"]\n',
        "('dog', 'cat')\n",
        "[labels]\ndog\n",
        "names: ['dog']\n",
    ),
    "with a quote": ('"dog"\n"cat"\n', "“dog”\n"),
    "which stands for no value": ("nan\ndog\n", "N/A\n", "-\n", ".\n", "__background__\ndog\n", "???\n", "...\ndog\n"),
    "which is the value of a label": ("True\n",),
    "which has values": ("0 1 0 1\n", "dog:1\ncat:0\n", "dog = 0\n", "(dog:1.2)\n", "0.91 dog\n", "dog 0.91\n"),
    "with a line break or another character": ("\x1b[31mdog\n", "\u202edog\n", "\u200bdog\n", "red\xa0kite\n"),
}
NAMES_OF_VECTORS = {
    "with a line break or another character": "\x1b[31mcat \u202ecat c\nat c\0at",
    FORM: "#animals photos/a.jpg",
    "which stands for no value": "nan",
    "or differs only in case": "SEA",
}
NOT_FINITE, NONE = np.array([[np.nan] * 4] * 2, np.float32), np.zeros(0, np.float32)

REFUSALS = [
    of_list("an empty list", "", "contains no class names; write one class name per line"),
    of_list(
        "a name twice",
        "sea\n\nboat\n sea\tdeep\n",
        "line 4 has the label 'sea', which is 'sea' of {at}/labels.txt line 1",
    ),
    of_list("descriptions without a name", "sea\n\tdeep\n", "has the label '', which is no name"),
    of_list(
        "a control character",
        "sea\x07\n",
        "has the label 'sea\\x07', with a line break or another",
    ),
    *(of_lines(listed, 1, says) for says, lists in OTHER_FILES.items() for listed in lists),
    of_lines("dog\n#fish\ncat\n", 2, "'#fish', which looks like a comment"),
    of_lines("Dog\ncat\n\ndog\n", 4, "which is 'Dog' of {at}/labels.txt line 1, or differs only in case"),
    of_lines("red kite\nred_kite\n", 2, VARIANT),
    of_lines("dog\nｄｏｇ\n", 2, VARIANT),
    of_lines("dog\ncat\ndog, cat\n", 3, SEVERAL),
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
    *(
        of_fields(f"a scale of {scale}", "its scale or bias is not from 0", scale=scale)
        for scale in (np.inf, 1e39, 0.0, -5.0)
    ),
    of_fields("a bias that overflows", "its scale or bias is not from 0", bias=-1e39),
    of_fields("a projection that overflows", "its projection do not fit", projection=np.full((6, 4), 1e38, np.float32)),
    of_fields(
        "no width", "its vectors do not fit", vectors=np.zeros((2, 0), np.float32), background=NONE, projection=None
    ),
    of_fields("a backbone that is no text", "or the backbone is not text", backbone=5),
    of_fields("a name that is no text", "a name, a template", names=("sea", 5)),
    of_fields("a description that is no text", "a description or the backbone", descriptions=((), (5,))),
    Refusal(
        "a name that is empty",
        lambda at: written(at, replace(VECTORS, names=("sea", ""))),
        read_name_vectors,
        "{at}/v.safetensors name 2 has the label '', which is no name",
    ),
    *(
        Refusal(
            f"the name {name!r} in a file of vectors",
            lambda at, name=name: written(at, replace(VECTORS, names=("sea", name))),
            read_name_vectors,
            "{at}/v.safetensors name 2 has the label ",
            says,
        )
        for says, names in NAMES_OF_VECTORS.items()
        for name in names.split(" ")
    ),
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
