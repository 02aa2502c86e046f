"""The vocabulary of the rule tables."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

Transform = Callable[[np.ndarray], np.ndarray]


def same(tensor: np.ndarray) -> np.ndarray:
    """Keep a tensor."""
    return tensor


def transpose(tensor: np.ndarray) -> np.ndarray:
    """[out, in] as PyTorch stores a linear weight -> [in, out]."""
    return tensor.T


def patch_kernel(tensor: np.ndarray) -> np.ndarray:
    """Turn a patch convolution [D,3,p,p] into the matrix [p·p·3, D] over a patch's rows, columns and channels."""
    return tensor.transpose(2, 3, 1, 0).reshape(-1, tensor.shape[0])


def flat_columns(tensor: np.ndarray) -> np.ndarray:
    """[D, heads, D/heads] as Flax stores an input projection -> [D, D]."""
    return tensor.reshape(tensor.shape[0], -1)


def flat_rows(tensor: np.ndarray) -> np.ndarray:
    """[heads, D/heads, D] as Flax stores an output projection, or a patch kernel [p,p,3,D] -> [·, D]."""
    return tensor.reshape(-1, tensor.shape[-1])


def flat(tensor: np.ndarray) -> np.ndarray:
    """[heads, D/heads] -> [D]."""
    return tensor.reshape(-1)


def without_class_position(tensor: np.ndarray) -> np.ndarray:
    """Positions of the patches alone, [1,S·S,D] -> [1,1+S·S,D], where the class token's has gone into the token."""
    return np.pad(tensor, ((0, 0), (1, 0), (0, 0)))


def token_set(tensor: np.ndarray) -> np.ndarray:
    """[L,P,D] -> [L,1,P,D], the batch axis of our prompt tokens."""
    return tensor[:, None]


@dataclass(frozen=True)
class Rule:
    """A source name that `pattern` matches in full becomes `target`, a parameter path with \\1, \\2 … from the match.

    part: where several tensors make one parameter, this one's place along `axis`.
    reshape: the tensor may have another shape than the parameter, with the same elements in the same order.
    """

    pattern: str
    target: str
    transform: Transform = same
    part: int | None = None
    axis: int = -1
    reshape: bool = False


@dataclass(frozen=True)
class Source:
    """A known layout of tensor names.

    marker: the tensor by whose presence the layout is recognised, without what a program wraps around all names.
    ignored: patterns of tensors that may be left over. optional: patterns of parameter paths that the file may lack;
    they keep the values that they have.
    """

    name: str
    marker: str
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


def nested(rules: tuple[Rule, ...], prefix: str, under: str) -> tuple[Rule, ...]:
    """Return rules for the same layout below `prefix` (a regex) in the file and below `under` in our model."""
    return tuple(replace(rule, pattern=prefix + rule.pattern, target=under + rule.target) for rule in rules)
