r"""The vocabulary of the rule tables, which are read both ways: from a source's tensors to ours, and back.

Two examples. A rule with a group and a transform:

    rule = Rule(r"blocks\.(\d+)\.(?:fc1|w12)\.weight", r"blocks/\1/mlp/fc1/kernel", transpose)

reads the tensors `blocks.7.fc1.weight` and `blocks.7.w12.weight` and makes `blocks/7/mlp/fc1/kernel` of either, by
`re.fullmatch(rule.pattern, name)` and `match.expand(rule.target)`. Backwards, the pattern becomes the name template
`blocks.{g1}.fc1.weight` (the first of `fc1|w12` is written), and the target the pattern of the paths that it makes,
`blocks/(?P<g1>\d+)/mlp/fc1/kernel`:

    rule.makes("blocks/7/mlp/fc1/kernel")        # True
    rule.tensor_name("blocks/7/mlp/fc1/kernel")  # "blocks.7.fc1.weight"; its value is the inverse of `transpose`

Rules that join tensors: of P prompts for each of L = 12 blocks, the authors' code stores those of the first one apart,

    Rule("prompt_embeddings", "prompts/deep", token_set, at=(0,), axes=(0,), size=1)
    Rule("deep_prompt_embeddings", "prompts/deep", token_set, at=(1,), axes=(0,))

so [1,P,D] and [11,P,D] become f32[1,1,P,D] and f32[11,1,P,D] at places 0 and 1 along axis 0, together f32[12,1,P,D].
Backwards, place 0 takes `size` = 1 entry of that axis and place 1 the others (`official.cut`). With at=(r"\1",) the
place is the number in the name instead, one entry per tensor: `layer.4.extra` is entry 4.
"""

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

Transform = Callable[[np.ndarray], np.ndarray]
# The way back. It is told the number of attention heads, which a matrix of ours does not show.
Inverse = Callable[[np.ndarray, int], np.ndarray]
INVERSES: dict[Transform, Inverse] = {}

BACKBONE, HEAD = "backbone/", "head/"  # where paths of a whole model begin


def inverse_of(transform: Transform) -> Callable[[Inverse], Inverse]:
    """Return a decorator that registers a function as the way back of `transform`."""

    def register(inverse: Inverse) -> Inverse:
        INVERSES[transform] = inverse
        return inverse

    return register


# ------------------------------------------------------------------------------------------------------- transforms
def same(tensor: np.ndarray) -> np.ndarray:
    """Keep a tensor."""
    return tensor


@inverse_of(same)
def _same_back(value: np.ndarray, heads: int) -> np.ndarray:
    return value


def transpose(tensor: np.ndarray) -> np.ndarray:
    """[out, in] as PyTorch stores a linear weight -> [in, out]."""
    return tensor.T


@inverse_of(transpose)
def _transpose_back(value: np.ndarray, heads: int) -> np.ndarray:
    return value.T


def patch_kernel(tensor: np.ndarray) -> np.ndarray:
    """Turn a patch convolution [D,3,p,p] into the matrix [p·p·3, D] over a patch's rows, columns and channels."""
    return tensor.transpose(2, 3, 1, 0).reshape(-1, tensor.shape[0])


@inverse_of(patch_kernel)
def _patch_convolution(value: np.ndarray, heads: int) -> np.ndarray:
    side = math.isqrt(value.shape[0] // 3)
    return value.reshape(side, side, 3, -1).transpose(3, 2, 0, 1)


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


@inverse_of(token_set)
def _token_set_back(value: np.ndarray, heads: int) -> np.ndarray:
    return value.squeeze(1)


# -------------------------------------------------------------------------------------------------------- the tables
@dataclass(frozen=True)
class Rule:
    """A source name that `pattern` matches in full becomes `target`, a parameter path with \\1, \\2 … from the match.

    at, axes: where several tensors make one parameter, this one's place along each of `axes`: a number, or \\1, \\2 …
    from the match, whose tensors have one entry each along that axis.
    size: how many entries of the first of `axes` it has; None = it shares what others leave equally with its like.
    reshape: the tensor may have another shape than the parameter, with the same elements in the same order.

    A rule can be read backwards if its transform has an inverse and its pattern is made of names, dots, groups that are
    not nested and groups that are not kept. `(?:a|b)` is then written as a, and `(?:…)?` is left out. So the name to
    write follows from the pattern in every table, and is not stored a second time.
    """

    pattern: str
    target: str
    transform: Transform = same
    at: tuple[int | str, ...] = ()
    axes: tuple[int, ...] = ()
    size: int | None = None
    reshape: bool = False

    def makes(self, path: str) -> bool:
        """Return whether a tensor could become `path` by this rule, which must be readable backwards."""
        return self._match(path) is not None

    def tensor_name(self, path: str, places: tuple[int, ...] = ()) -> str:
        """Return the name of the tensor that becomes `path`, one that the rule makes, at `places` along the axes."""
        filled = self._match(path).groupdict()
        for at, place in zip(self.at, places, strict=True):
            if isinstance(at, str):
                filled[f"g{at[1:]}"] = str(place)
        return _template(self.pattern)[0].format(**filled)

    def _match(self, path: str) -> re.Match[str] | None:
        return re.fullmatch(_path_pattern(self.target, _template(self.pattern)[1]), path)


_PIECE = re.compile(r"\\(\.)|\((\?:)?([^()]*)\)(\?)?|([\w/-]+)")


@functools.cache
def _template(pattern: str) -> tuple[str, tuple[str, ...]]:
    """Turn a pattern into a format string with {g1}, {g2} … for its groups, and what these groups match."""
    template, groups, end = "", [], 0
    for piece in _PIECE.finditer(pattern):
        if piece.start() != end:
            break
        end = piece.end()
        dot, kept_out, inner, optional, plain = piece.groups()
        if dot or plain:
            template += dot or plain
        elif kept_out:
            template += "" if optional else inner.partition("|")[0].replace("\\.", ".")
        else:
            groups.append(inner)
            template += f"{{g{len(groups)}}}"
    if end != len(pattern):
        raise ValueError(f"the rule {pattern!r} cannot be read backwards")
    return template, tuple(groups)


@functools.cache
def _path_pattern(target: str, groups: tuple[str, ...]) -> str:
    """Turn a target into the regular expression of the paths that it gives."""
    return re.sub(r"\\\\(\d)", lambda found: f"(?P<g{found[1]}>{groups[int(found[1]) - 1]})", re.escape(target))


@dataclass(frozen=True)
class Source:
    """A known layout of tensor names.

    marker: the tensor by whose presence the layout is recognised, without what a program wraps around all names.
    ignored: patterns of tensors that may be left over. optional: patterns of parameter paths that the file may lack;
    they keep the values that they have.
    beside: of a whole model, patterns of tensors that may be left over as well if its backbone alone is wanted.
    sorted_labels: the authors' data sets list labels in alphabetical order, and so do the rows of the head.
    """

    name: str
    marker: str
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    sorted_labels: bool = False

    @property
    def whole(self) -> bool:
        """Whether the layout is that of a whole model: backbone, prompts and head."""
        return any(rule.target.startswith(BACKBONE) for rule in self.rules)

    @property
    def head_alone(self) -> bool:
        """Whether the layout is that of a head without its backbone."""
        return all(rule.target.startswith(HEAD) for rule in self.rules)

    def of_backbone(self) -> "Source":
        """Return the layout of a whole model as its backbone alone reads it: prompts and head are left over."""
        mine = tuple(rule for rule in self.rules if rule.target.startswith(BACKBONE))
        others = tuple(rule.pattern for rule in self.rules if not rule.target.startswith(BACKBONE))
        rules = tuple(replace(rule, target=rule.target.removeprefix(BACKBONE)) for rule in mine)
        optional = tuple(pattern.removeprefix(BACKBONE) for pattern in self.optional)
        ignored = (*self.ignored, *self.beside, *others)
        return replace(self, rules=rules, ignored=ignored, optional=optional, beside=())


def nested(rules: tuple[Rule, ...], prefix: str, under: str) -> tuple[Rule, ...]:
    """Return rules for the same layout below `prefix` (a regex) in the file and below `under` in our model."""
    return tuple(replace(rule, pattern=prefix + rule.pattern, target=under + rule.target) for rule in rules)
