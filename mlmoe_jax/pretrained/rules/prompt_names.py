"""Layouts of whole prompt-tuned ViTs in the authors' code: ML-VPT, VPT, GateVPT and E2VPT."""

from dataclasses import replace

import numpy as np

from mlmoe_jax.pretrained.rules.base import Layout, Rule, invertible, linear_rules, nest, norm_rules, token_set
from mlmoe_jax.pretrained.rules.vit_names import CHUNKED_BLOCK, fuse_rules, patch_rules, timm_rules

# ------------------------------------------------------------------------------------------------------- transforms
# [1, rows, D], one weight vector per row -> [rows, D]; and [1, rows], one bias per row -> [rows].
label_rows = invertible(lambda tensor: tensor.squeeze(0), lambda value: value.reshape(1, -1, value.shape[-1]))
label_values = invertible(lambda tensor: tensor.squeeze(0), lambda value: value.reshape(1, -1))


def join_heads(tensor: np.ndarray) -> np.ndarray:
    """Merge the heads of the prompt keys or values of one block: [heads, m, D/heads] -> [1, 1, m, D]."""
    return tensor.transpose(1, 0, 2).reshape(1, 1, tensor.shape[1], -1)


# ------------------------------------------------------------------------------------------------------------ ML-VPT
def _ml_vpt(backbone: tuple[Rule, ...]) -> tuple[Rule, ...]:
    return (
        *nest(backbone, r"img_encoder\.", "backbone/"),
        *nest(_deep_prompts(), r"img_encoder\.", ""),
        Rule(r"adapt_experts\.W1", "head/bank/up/kernel"),
        Rule(r"adapt_experts\.b1", "head/bank/up/bias"),
        Rule(r"adapt_experts\.W2", "head/bank/down/kernel"),
        Rule(r"adapt_experts\.b2", "head/bank/down/bias"),
        *_routed_classifier("co", "co"),
        *_routed_classifier("cl", "dc"),  # `cl` is DC in the paper
    )


def _routed_classifier(pattern: str, target: str) -> tuple[Rule, ...]:
    """Return the rules of the gate and the classifier of one group of experts.

    Args:
      pattern: prefix of the tensor names.
      target: name of the group of experts in the parameter paths of the head.
    """
    return (
        # Row e·K + k of a gate is entry [e,k] of [M,K].
        Rule(rf"{pattern}_gate\.W", f"head/{target}/gate/kernel", label_rows, reshape=True),
        Rule(rf"{pattern}_gate\.b", f"head/{target}/gate/bias", label_values, reshape=True),
        Rule(rf"{pattern}_fc\.W", f"head/{target}/classifier/kernel", label_rows),
        Rule(rf"{pattern}_fc\.b", f"head/{target}/classifier/bias", label_values),
    )


def _deep_prompts() -> tuple[Rule, ...]:
    """Return the rules of deep prompts.

    The prompts of block 0 are one tensor, and the prompts of all other blocks are another tensor.
    """
    first = Rule("prompt_embeddings", "prompts/deep", token_set, index=(0,), axes=(0,), size=1)
    return first, replace(first, pattern="deep_prompt_embeddings", index=(1,), size=None)


ML_VPT_DINOV2 = Layout("ml_vpt_dinov2", "img_encoder.blocks.0.0.ls1.gamma", _ml_vpt(timm_rules(block=CHUNKED_BLOCK)))
# On the supervised ViT-B/16, MAE and MoCo v3.
ML_VPT = Layout("ml_vpt", "adapt_experts.W1", _ml_vpt(timm_rules()))


# ------------------------------------------------------------------------------------------- VPT, E2VPT and GateVPT
def vpt_rules() -> tuple[Rule, ...]:
    """Return the rules of the ViT that is pretrained with labels, as the code of VPT and E2VPT names it."""
    layer = r"encoder\.layer\.(\d+)"
    return (
        Rule(r"embeddings\.cls_token", "cls_token"),
        Rule(r"embeddings\.position_embeddings", "pos_embed"),
        *patch_rules(r"embeddings\.patch_embeddings"),
        *norm_rules(rf"{layer}\.attention_norm", r"blocks/\1/norm1"),
        *norm_rules(rf"{layer}\.ffn_norm", r"blocks/\1/norm2"),
        *fuse_rules(rf"{layer}\.attn\.PART\."),
        *linear_rules(rf"{layer}\.attn\.out", r"blocks/\1/attn/proj"),
        *linear_rules(rf"{layer}\.ffn\.(fc[12])", r"blocks/\1/mlp/\2"),
        *norm_rules(r"encoder\.encoder_norm", "norm"),
    )


def _key_values(attention: str, *, shared: bool) -> tuple[Rule, ...]:
    """Return the rules of E2VPT's prompt keys and values.

    Args:
      attention: regex of the attention layer's name, with the block as its group.
      shared: whether keys and values share one tensor per block; otherwise each has its own tensor.
    """
    name = rf"{attention}\.deep_QKV_embeddings"
    together = Rule(name, "prompts/key_value", join_heads, index=(r"\1", 0), axes=(0, 1))
    keys, values = replace(together, pattern=f"{name}_K"), replace(together, pattern=f"{name}_V", index=(r"\1", 1))
    return (together,) if shared else (keys, values)


_MASKS = (
    Rule("prompt_soft_tokens_mask_cls_token", "prompts/token_mask"),
    Rule("prompt_soft_tokens_pieces_mask_cls_token", "prompts/segment_mask"),
)
_SHALLOW = (Rule("prompt_embeddings", "prompts/shallow", token_set), *linear_rules("prompt_proj", "prompts/projection"))
_GATES = (Rule("gate_logit", "prompts/gate"), Rule("temp", "prompts/temperature"))


def _layout(name: str, outer: str, inner: str, marker: str, rules: tuple[Rule, ...], *, required: str = "") -> Layout:
    """Return the layout of an encoder with a linear head, in the code of VPT, GateVPT and E2VPT.

    The tensor names of the encoder begin with `outer` + `inner`.

    Args:
      name: name of the layout.
      outer: prefix of the encoder in a model whose head is outside the encoder; "" for an encoder with its own head.
      inner: prefix inside the encoder. All names of the encoder have it, except the names of the encoder's own head.
      marker: name of the tensor that identifies the layout, without both prefixes.
      rules: the rules of the encoder, without both prefixes.
      required: name of another tensor that the file must have, without both prefixes; "" if there is none.
    """
    encoder = nest(rules, f"{outer}{inner}".replace(".", r"\."), "")
    head = linear_rules(r"head(?:\.last_layer)?", "head/classifier")
    # Masks that are missing in a file keep their initial value 1.
    optional, ignored = (r"prompts/(?:token|segment)_mask",), (r"head\..*",)
    names = (f"{outer}{inner}{required}",) if required else ()
    marker = f"{outer}{inner}{marker}"
    return Layout(name, marker, (*encoder, *head), optional=optional, ignored_for_backbone=ignored, required=names)


def _supervised(outer: str) -> tuple[Layout, ...]:
    """Return the layouts of the VPT and E2VPT code for the ViT that is pretrained with labels.

    The layout `vpt` is without prompts. `outer`: see `_layout`.
    """
    backbone, attention = nest(vpt_rules(), "", "backbone/"), r"encoder\.layer\.(\d+)\.attn"
    deep = (*backbone, *_deep_prompts(), *_SHALLOW[1:], *_MASKS)
    keys = "encoder.layer.0.attn.deep_QKV_embeddings"
    prefixes = (outer, "transformer.")
    return (
        _layout("e2vpt_unshared", *prefixes, f"{keys}_K", (*deep, *_key_values(attention, shared=False))),
        _layout("e2vpt", *prefixes, keys, (*deep, *_key_values(attention, shared=True))),
        _layout("vpt_deep", *prefixes, "deep_prompt_embeddings", deep),
        _layout("vpt_shallow", *prefixes, "prompt_embeddings", (*backbone, *_SHALLOW)),
        _layout("vpt", *prefixes, "encoder.encoder_norm.weight", backbone),
    )


def _self_supervised(outer: str) -> tuple[Layout, ...]:
    """Return the layouts of the VPT, E2VPT and GateVPT code for MAE and MoCo v3, whose tensors have timm's names.

    On MAE, the code of VPT and E2VPT replaces the last norm by `fc_norm`. GateVPT's code keeps the last norm.
    `outer`: see `_layout`.
    """
    backbone, attention = nest(timm_rules(), "", "backbone/"), r"blocks\.(\d+)\.attn"
    prompts = (*_deep_prompts(), *_SHALLOW[1:], *_MASKS)
    keys, key_values = "blocks.0.attn.deep_QKV_embeddings", _key_values(attention, shared=True)
    mae, on_mae = nest(timm_rules(norm_name="fc_norm"), "", "backbone/"), {"required": "fc_norm.weight"}
    return (
        _layout("e2vpt_mae", outer, "", keys, (*mae, *prompts, *key_values), **on_mae),
        _layout("vpt_deep_mae", outer, "", "deep_prompt_embeddings", (*mae, *prompts), **on_mae),
        _layout("e2vpt_timm", outer, "", keys, (*backbone, *prompts, *key_values)),
        _layout("vpt_deep_timm", outer, "", "deep_prompt_embeddings", (*backbone, *prompts)),
        _layout("gate_vpt", outer, "", "gate_logit", (*backbone, *_SHALLOW, *_GATES)),
        _layout("vpt_shallow_mae", outer, "", "prompt_embeddings", (*mae, *_SHALLOW), **on_mae),
        _layout("vpt_shallow_timm", outer, "", "prompt_embeddings", (*backbone, *_SHALLOW, *_GATES)),
    )


# Prefixes of an encoder that is stored alone, and of the encoder in a classifier.
_ENCODERS = ("", "enc.")
PROMPT_LAYOUTS = (
    *(ML_VPT_DINOV2, ML_VPT),
    *(source for outer in _ENCODERS for source in (*_supervised(outer), *_self_supervised(outer))),
)
