r"""Rules that map published tensors to parameters, and parameters back to published tensors.

Two examples. A rule with a group and a transform:

    rule = Rule(r"blocks\.(\d+)\.(?:fc1|w12)\.weight", r"blocks/\1/mlp/fc1/kernel", transpose)

maps the tensors `blocks.7.fc1.weight` or `blocks.7.w12.weight` to `blocks/7/mlp/fc1/kernel`, by
`re.fullmatch(rule.pattern, name)` and `match.expand(rule.target)`. Backwards, the pattern becomes the name template
`blocks.{g1}.fc1.weight` (the first of `fc1|w12` is written), and the target becomes the pattern of its paths,
`blocks/(?P<g1>\d+)/mlp/fc1/kernel`:

    rule.tensor_name("blocks/7/mlp/fc1/kernel")  # "blocks.7.fc1.weight"; its value is the inverse of `transpose`

Rules that join tensors: of P prompts per block in L = 12 blocks, the authors' code stores the first block separately,

    Rule("prompt_embeddings", "prompts/deep", token_set, index=(0,), axes=(0,), size=1)
    Rule("deep_prompt_embeddings", "prompts/deep", token_set, index=(1,), axes=(0,))

so [1,P,D] and [11,P,D] become f32[1,1,P,D] and f32[11,1,P,D] with index 0 and 1 along axis 0, together f32[12,1,P,D].
Backwards, index 0 has `size` = 1 entry of the axis, and index 1 all other entries (`official.split_value`). With
index=(r"\1",) the index is the number in the name, one entry per tensor: `layer.4.extra` is entry 4. Such rules, and
rules along two axes, cannot be read backwards.

Rules with the same pattern make several parameters of one tensor.
"""

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

Transform = Callable[[np.ndarray], np.ndarray]
INVERSES: dict[Transform, Transform] = {}

BACKBONE, HEAD = "backbone/", "head/"  # prefixes of the paths of a whole model


def invertible(transform: Transform, inverse: Transform) -> Transform:
    """Register `inverse` as the inverse of `transform`, and return `transform`."""
    INVERSES[transform] = inverse
    return transform


# ------------------------------------------------------------------------------------------------------- transforms
# Functions of a tensor, and their inverses, functions of a value of the model.
identity = invertible(lambda tensor: tensor, lambda value: value)
# [out, in] as PyTorch stores a linear weight -> [in, out].
transpose = invertible(lambda tensor: tensor.T, lambda value: value.T)
# A patch convolution [D,3,p,p] -> the matrix [p·p·3, D] over a patch's rows, columns and channels.
patch_kernel = invertible(
    lambda tensor: tensor.transpose(2, 3, 1, 0).reshape(-1, tensor.shape[0]),
    lambda value: value.reshape(*[math.isqrt(value.shape[0] // 3)] * 2, 3, -1).transpose(3, 2, 0, 1),
)
# [L,P,D] -> [L,1,P,D], the batch axis of our prompt tokens.
token_set = invertible(lambda tensor: tensor[:, None], lambda value: value.squeeze(1))


def flatten_rows(tensor: np.ndarray) -> np.ndarray:
    """Merge all axes but the last, as of [heads, D/heads, D] in Flax to [D, D], or [p,p,3,D] to [3·p·p, D]."""
    return tensor.reshape(-1, tensor.shape[-1])


def pad_class_position(tensor: np.ndarray) -> np.ndarray:
    """Insert a zero position for the class token into patch positions: [1,S·S,D] -> [1,1+S·S,D].

    In such a file the position of the class token is already added to the class token.
    """
    return np.pad(tensor, ((0, 0), (1, 0), (0, 0)))


# -------------------------------------------------------------------------------------------------------- the tables
@dataclass(frozen=True)
class Rule:
    """A rule that maps the names of published tensors to a parameter path, and converts the tensors.

    A rule can be read backwards under three conditions. Its transform has an inverse. Its target contains all groups of
    its pattern. Its pattern consists of names, dots, groups that are not nested, and non-capturing groups. Backwards,
    `(?:a|b)` is written as a, and `(?:…)?` is omitted.

    Attributes:
      pattern: a regex that matches the whole name of a tensor.
      target: the parameter path, in which \\1, \\2 … stand for the groups of the match.
      transform: conversion of the tensor.
      index: position of this tensor along each of `axes`, if several tensors form one parameter. A number is the order
        of concatenation. \\1, \\2 … stand for the number in a group of the match; each tensor is then one entry of the
        axis.
      axes: the axes of the parameter along which the tensors are concatenated.
      size: number of entries of this tensor along the first of `axes`. None means that the tensors without a size have
        equally many entries.
      reshape: whether the tensor may be reshaped to the shape of the parameter, with the elements in the same order.
    """

    pattern: str
    target: str
    transform: Transform = identity
    index: tuple[int | str, ...] = ()
    axes: tuple[int, ...] = ()
    size: int | None = None
    reshape: bool = False

    def tensor_name(self, path: str) -> str | None:
        """Return the tensor name that the rule maps to a parameter path; None if the rule does not produce the path.

        Raises ValueError if the rule cannot be read backwards.
        """
        template, groups = _template(self.pattern)
        match = re.fullmatch(_path_pattern(self.target, groups), path)
        return template.format(**match.groupdict()) if match else None


Rules = tuple[Rule, ...]
_PIECE = re.compile(r"\\(\.)|\((\?:)?([^()]*)\)(\?)?|([\w/-]+)")


@functools.cache
def _template(pattern: str) -> tuple[str, tuple[str, ...]]:
    """Return a regex as a format string with {g1}, {g2} … in place of its groups, and the regexes of the groups."""
    template, groups, end = "", [], 0
    for piece in _PIECE.finditer(pattern):
        if piece.start() != end:
            break
        end = piece.end()
        dot, non_capturing, inner, optional, plain = piece.groups()
        if dot or plain:
            template += dot or plain
        elif non_capturing:
            template += "" if optional else inner.partition("|")[0].replace("\\.", ".")
        else:
            groups.append(inner)
            template += f"{{g{len(groups)}}}"
    if end != len(pattern):
        raise ValueError(f"the rule {pattern!r} cannot be read backwards")
    return template, tuple(groups)


@functools.cache
def _path_pattern(target: str, groups: tuple[str, ...]) -> str:
    """Convert the target of a rule to a regex that matches the parameter paths that the rule produces."""
    return re.sub(r"\\\\(\d)", lambda match: f"(?P<g{match[1]}>{groups[int(match[1]) - 1]})", re.escape(target))


@dataclass(frozen=True)
class Layout:
    """The names of the tensors in the checkpoints of one code base, with the rules that map them to parameter paths.

    Attributes:
      marker: the name of a tensor that identifies the layout, without the common prefix of all names.
      ignored: regexes of tensor names that need no rule.
      optional: regexes of parameter paths that a file may lack. These parameters then keep their values.
      ignored_for_backbone: regexes of further tensor names that need no rule if only the backbone of a whole model is
        read.
      sorted_labels: whether the outputs of the head are in alphabetical order of the labels, as in the authors' data
        sets.
      required: the names of other tensors that a file in this layout must have.
    """

    name: str
    marker: str
    rules: Rules
    ignored: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    ignored_for_backbone: tuple[str, ...] = ()
    sorted_labels: bool = False
    required: tuple[str, ...] = ()

    @property
    def is_whole_model(self) -> bool:
        """Whether files in this layout contain a whole model: backbone, prompts and head."""
        return any(rule.target.startswith(BACKBONE) for rule in self.rules)

    @property
    def is_head(self) -> bool:
        """Whether files in this layout contain only a head."""
        return all(rule.target.startswith(HEAD) for rule in self.rules)

    def backbone_only(self) -> "Layout":
        """Return a copy of the layout that reads only the backbone from a file with a whole model."""
        backbone = tuple(rule for rule in self.rules if rule.target.startswith(BACKBONE))
        others = tuple(rule.pattern for rule in self.rules if not rule.target.startswith(BACKBONE))
        rules = tuple(replace(rule, target=rule.target.removeprefix(BACKBONE)) for rule in backbone)
        optional = tuple(pattern.removeprefix(BACKBONE) for pattern in self.optional)
        ignored = (*self.ignored, *self.ignored_for_backbone, *others)
        return replace(self, rules=rules, ignored=ignored, optional=optional, ignored_for_backbone=())


def nest(rules: Rules, pattern_prefix: str, target_prefix: str) -> Rules:
    """Return the rules with `pattern_prefix` before each pattern and `target_prefix` before each target."""
    return tuple(
        replace(rule, pattern=pattern_prefix + rule.pattern, target=target_prefix + rule.target) for rule in rules
    )


def linear_rules(pattern: str, target: str, *, kernel: Transform = transpose, bias: bool = True) -> Rules:
    """Return the rules of a PyTorch layer with a weight and, if `bias`, a bias; `pattern` is the regex of its name."""
    weight = Rule(rf"{pattern}\.weight", f"{target}/kernel", kernel)
    return (weight, Rule(rf"{pattern}\.bias", f"{target}/bias")) if bias else (weight,)


def norm_rules(pattern: str, target: str) -> tuple[Rule, Rule]:
    """Return the rules of the scale and the bias of a PyTorch normalization layer."""
    return Rule(rf"{pattern}\.weight", f"{target}/scale"), Rule(rf"{pattern}\.bias", f"{target}/bias")
