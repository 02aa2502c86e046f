"""The label graph of ML-GCN and the vectors of its nodes, from the co-occurrence of labels in training.

Chen, Wei, Wang and Guo, "Multi-label image recognition with graph convolutional networks", CVPR 2019. Axes: k labels, d
numbers per vector.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from etils import epath
from jaxtyping import Float, Float32, Int32, Num

from mlmoe_jax.errors import UserError
from mlmoe_jax.runtime.array_types import Floats
from mlmoe_jax.runtime.files import damage_explained
from mlmoe_jax.runtime.text import abbreviate

# Names that VOC writes as one word.
COMPOUNDS = {"diningtable": ("dining", "table"), "pottedplant": ("potted", "plant"), "tvmonitor": ("tv", "monitor")}
# The standard deviation of the numbers in GloVe's 300-dimensional vectors of the COCO label names.
GLOVE_DEVIATION = 0.377
_PARTS = re.compile(r"[^\W_]+")
_THRESHOLD, _WEIGHT = 0.4, 0.25  # of an edge, and of the neighbors of a label together
_EPSILON = 1e-6  # as in the authors' code, for labels without edges

Counts = Num[np.ndarray, "k k"]  # the number of images with both labels, with a zero diagonal
Positives = Num[np.ndarray, " k"]  # the number of images with each label


def conditional_probabilities(counts: Counts, positives: Positives) -> Float[np.ndarray, "k k"]:
    """Return P, f[K,K], with P[i,j] = counts[i,j] / positives[i] = p(label j | label i) (ML-GCN, eq. 6).

    The row of a label without positives is 0.
    """
    counts, positives = np.asarray(counts, np.float64), np.asarray(positives, np.float64)[:, None]
    return np.divide(counts, positives, out=np.zeros_like(counts), where=positives > 0)


def label_graph(counts: Counts, positives: Positives) -> Float[np.ndarray, "k k"]:
    """Return the normalized adjacency matrix Ā, f[K,K], of the layers H ← act(Ā H W) in ML-GCN.

    There is an edge from label i to label j, B[i,j] = 1, if p(j | i) ≥ 0.4 (ML-GCN, eq. 7). All neighbors of a label
    together have a quarter of the weight of the label itself, which is a share of 0.2 (ML-GCN, eq. 8). Without edges, Ā
    is the identity. As in the authors' code,

        W = 0.25·B/(column sums of B + 1e-6) + I
        Ā = diag(d) Wᵀ diag(d) with d = (row sums of W)^(−1/2)

    A label receives information from the labels that imply it (`person` from 55 of the 80 labels of COCO). The weights
    are normalized by column sums, but the degrees are row sums. The equation (ML-GCN, eq. 8) has row sums only, and no
    transpose.
    """
    edges = (conditional_probabilities(counts, positives) >= _THRESHOLD).astype(np.float64)
    weights = _WEIGHT * edges / (edges.sum(axis=0) + _EPSILON) + np.eye(len(edges))
    scale = weights.sum(axis=1) ** -0.5
    return (scale[:, None] * weights.T * scale).astype(np.float32)


def frequency_order(positives: Positives) -> Int32[np.ndarray, " k"]:
    """Return the label indices i32[K], sorted by decreasing number of positives. The sort is stable."""
    return np.argsort(-np.asarray(positives, np.int64), kind="stable").astype(np.int32)


# ------------------------------------------------------------------------------------------------ vectors of labels
def read_glove(path: str | Path, names: Sequence[str]) -> Float32[np.ndarray, "k d"]:
    """Return one vector per label name, f32[K,d], from a GloVe text file.

    The file has one word and d numbers per line, after an optional line of two numbers. A name is converted to lower
    case and split at blanks and underscores. A word that is not in the file is split at all characters other than
    letters and digits (`t-shirt`, `plant(potted)`). The vector of a name is the mean of the vectors of its words that
    are in the file, as in ML-GCN. Only the necessary lines are parsed.

    Raises UserError if the file cannot be read or has another format, or it has none of the words of a label.
    """
    words_by_name = [_words(name) for name in names]
    needed = {word for words in words_by_name for whole in words for word in (whole, *_PARTS.findall(whole))}
    word_vectors = _read_vectors(path, needed)
    vectors, unknown = [], []
    for name, words in zip(names, words_by_name, strict=True):
        parts = [part for word in words for part in ((word,) if word in word_vectors else _PARTS.findall(word))]
        rows = [word_vectors[part] for part in parts if part in word_vectors]
        if rows:
            vectors.append(np.mean(rows, axis=0))
        else:
            unknown.append(name)
    if unknown:
        raise UserError(
            f"{path} has no word of the labels {abbreviate(unknown)}; name labels in the language of the file or set "
            "model.head.graph.word_vectors='' to use the co-occurrence counts"
        )
    return np.asarray(vectors, np.float32)


def cooccurrence_vectors(
    counts: Counts, positives: Positives, images: int, *, width: int = 300
) -> Float32[np.ndarray, "k d"]:
    """Return one vector per label, f32[K,width], computed from the co-occurrence of the training labels.

    These vectors replace word vectors if there is no file of word vectors. Like word vectors from co-occurring words
    (Levy and Goldberg, sec. 5), they are computed from the spectrum of the positive pointwise mutual information

        M[i,j] = max(0, log(p(i,j) / (p(i) p(j)))),   p(i,i) = p(i),

    where p(i) is the fraction of images with label i, and p(i,j) the fraction of images with both labels. A label
    co-occurs with itself, so the diagonal is −log p(i). With the eigendecomposition M = Q Λ Qᵀ, the vectors are the
    rows of Q √Λ for the largest positive eigenvalues. Among all vectors of this width, their inner products are closest
    to M (Eckart and Young). The sign of a column makes its largest entry positive. Columns are padded with zeros to
    `width`. Each row is scaled to the norm 0.377·√width, which is the norm of GloVe vectors. Vectors of equal norm work
    best (Levy, Goldberg and Dagan, sec. 3.3), and the published learning rates of ML-GCN fit this norm.

    To avoid zero vectors, two kinds of artificial images are counted too: one image with only this label for each label
    without positives, and one image without labels. If all counts are 0, the vectors are orthogonal.

    The vectors are reproducible on one machine only, because another machine may rotate eigenvectors of equal
    eigenvalues. A trained model must therefore be stored with its vectors.
    """
    positives = np.asarray(positives, np.float64)
    occurrences = np.maximum(positives, 1)
    total = images + np.sum(positives == 0) + 1
    together = np.array(counts, np.float64)
    np.fill_diagonal(together, occurrences)
    with np.errstate(divide="ignore"):  # pairs that never occur get 0
        information = np.maximum(np.log(together * total / np.outer(occurrences, occurrences)), 0)
    values, axes = np.linalg.eigh(information)
    largest = np.argsort(-values, kind="stable")[:width]
    vectors = axes[:, largest] * np.sqrt(np.maximum(values[largest], 0))
    vectors = np.pad(_with_signs(vectors), ((0, 0), (0, width - len(largest))))
    return as_long_as_glove(vectors)


def as_long_as_glove(vectors: Float[np.ndarray, "k d"]) -> Float32[np.ndarray, "k d"]:
    """Return vectors scaled to the norm of GloVe vectors of their width, 0.377·√d; zeros remain."""
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = np.divide(vectors, length, out=np.zeros_like(vectors), where=length > 0)
    return (unit * GLOVE_DEVIATION * np.sqrt(vectors.shape[1])).astype(np.float32)


def _words(name: str) -> list[str]:
    words = name.lower().replace("_", " ").split()
    return [part for word in words for part in COMPOUNDS.get(word, (word,))]


def _read_vectors(path: str | Path, words: set[str]) -> dict[str, Floats]:
    """Return a dict of word -> vector f64[d] for the given words that the file has."""
    known = {word.encode(): word for word in words}
    vectors: dict[str, Floats] = {}
    width = 0
    with damage_explained(path), epath.Path(path).open("rb") as file:
        for line in file:
            word, _, text = line.partition(b" ")
            if width and (word not in known or known[word] in vectors):
                continue
            numbers = text.split()
            if len(numbers) < 2:  # a line of two numbers before the words
                continue
            width = width or len(numbers)
            # In the largest files, some words contain blanks and begin with a needed word.
            if word in known and len(numbers) == width:
                vectors[known[word]] = np.array([float(number) for number in numbers])
                if not np.isfinite(vectors[known[word]]).all():
                    raise ValueError("it has a number that is not finite")
    return vectors


def _with_signs(vectors: Floats) -> Floats:
    """Flip the signs of columns so that the entry of largest magnitude, of equal ones the first, is positive."""
    size = np.abs(vectors)
    ties = size >= size.max(axis=0) * (1 - 1e-6)
    pivot = vectors[ties.argmax(axis=0), np.arange(vectors.shape[1])]
    return vectors * np.where(pivot < 0, -1.0, 1.0)
