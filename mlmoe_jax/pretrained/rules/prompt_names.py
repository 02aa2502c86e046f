"""Layouts of whole prompt-tuned ViTs in the authors' code: ML-VPT, VPT, GateVPT and E2VPT."""

from dataclasses import replace

from mlmoe_jax.pretrained.rules.base import Layout, Rule, Rules, invertible, linear_rules, nest, norm_rules, token_set
from mlmoe_jax.pretrained.rules.vit_names import CHUNKED_BLOCK, fuse_rules, patch_rules, timm_rules

# [1, rows, D], one weight vector per row -> [rows, D]; and [1, rows], one bias per row -> [rows].
label_rows = invertible(lambda tensor: tensor.squeeze(0), lambda value: value.reshape(1, -1, value.shape[-1]))
label_values = invertible(lambda tensor: tensor.squeeze(0), lambda value: value.reshape(1, -1))


# ------------------------------------------------------------------------------------------------------------ ML-VPT
def _ml_vpt(backbone: Rules) -> Rules:
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


def _routed_classifier(pattern: str, target: str) -> Rules:
    """Return the rules of the gate and the classifier of one group of experts, which is at the path head/`target`."""
    return (
        # Row e·K + k of a gate is entry [e,k] of [M,K].
        Rule(rf"{pattern}_gate\.W", f"head/{target}/gate/kernel", label_rows, reshape=True),
        Rule(rf"{pattern}_gate\.b", f"head/{target}/gate/bias", label_values, reshape=True),
        Rule(rf"{pattern}_fc\.W", f"head/{target}/classifier/kernel", label_rows),
        Rule(rf"{pattern}_fc\.b", f"head/{target}/classifier/bias", label_values),
    )


def _deep_prompts() -> Rules:
    """Return the rules of deep prompts: one tensor for block 0, and one for all other blocks."""
    first = Rule("prompt_embeddings", "prompts/deep", token_set, index=(0,), axes=(0,), size=1)
    return first, replace(first, pattern="deep_prompt_embeddings", index=(1,), size=None)


ML_VPT_DINOV2 = Layout("ml_vpt_dinov2", "img_encoder.blocks.0.0.ls1.gamma", _ml_vpt(timm_rules(block=CHUNKED_BLOCK)))
# On the supervised ViT-B/16, MAE and MoCo v3.
ML_VPT = Layout("ml_vpt", "adapt_experts.W1", _ml_vpt(timm_rules()))


# ------------------------------------------------------------------------------------------- VPT, E2VPT and GateVPT
def vpt_rules() -> Rules:
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


def _key_values(attention: str) -> Rules:
    """Return the rules of E2VPT's prompts for the keys and the values of an attention layer.

    A file has one tensor per block for both, or two tensors: one for the keys and one for the values. `attention` is
    the regex of the attention layer's name, with the index of the block as its group.
    """
    name = rf"{attention}\.deep_QKV_embeddings"
    keys = Rule(
        f"{name}(?:_K)?",
        "prompts/key_value",
        lambda tensor: tensor.transpose(1, 0, 2).reshape(1, 1, tensor.shape[1], -1),  # [heads, m, D/heads] to [1,1,m,D]
        index=(r"\1", 0),
        axes=(0, 1),
    )
    return keys, replace(keys, pattern=f"{name}_V", index=(r"\1", 1))


_PROJECTION = linear_rules("prompt_proj", "prompts/projection")
_MASKS = (
    Rule("prompt_soft_tokens_mask_cls_token", "prompts/token_mask"),
    Rule("prompt_soft_tokens_pieces_mask_cls_token", "prompts/segment_mask"),
)
_SHALLOW = (Rule("prompt_embeddings", "prompts/shallow", token_set), *_PROJECTION)
_GATES = (Rule("gate_logit", "prompts/gate"), Rule("temp", "prompts/temperature"))


def _layouts(
    end: str,
    prefix: str,
    backbone: Rules,
    attention: str,
    *,
    shallow: Rules = _SHALLOW,
    marker: str = "prompt_embeddings",
    required: tuple[str, ...] = (),
) -> tuple[Layout, Layout]:
    """Return the layouts of an encoder with deep and with shallow prompts, in the code of VPT, GateVPT and E2VPT.

    Args:
      end: the end of the names of the layouts.
      prefix: prefix of all names of the encoder, except the names of its head. The arguments below do not contain it.
      backbone: the rules of the backbone.
      attention: regex of the name of an attention layer, with the block as its group.
      shallow: the rules of shallow prompts.
      marker: name of the tensor that identifies the layout of shallow prompts.
      required: names of other tensors that a file must have.
    """
    backbone = nest(backbone, "", "backbone/")
    deep = (*_deep_prompts(), *_PROJECTION, *_MASKS, *_key_values(attention))
    head = linear_rules(r"head(?:\.last_layer)?", "head/classifier")
    # Masks that are missing in a file keep their initial value 1.
    common = {"optional": (r"prompts/(?:token|segment)_mask",), "ignored_for_backbone": (r"head\..*",)}
    common["required"] = tuple(f"{prefix}{name}" for name in required)
    pattern = prefix.replace(".", r"\.")

    def layout(name: str, marker: str, prompts: Rules) -> Layout:
        rules = (*nest((*backbone, *prompts), pattern, ""), *head)
        return Layout(f"{name}{end}", f"{prefix}{marker}", rules, **common)

    return layout("vpt_deep", "deep_prompt_embeddings", deep), layout("vpt_shallow", marker, shallow)


def _all_layouts(outer: str) -> tuple[Layout, ...]:
    """Return the layouts of all encoders. `outer` is a prefix of their names; "" for an encoder with its own head.

    On MAE, the code of VPT and E2VPT replaces the last norm by `fc_norm`. GateVPT's code keeps the last norm.
    """
    labeled, timm = r"encoder\.layer\.(\d+)\.attn", r"blocks\.(\d+)\.attn"
    on_mae, gated = timm_rules(norm_name="fc_norm"), (*_SHALLOW, *_GATES)
    return (
        # The ViT that is pretrained with labels, perhaps without prompts.
        *_layouts("", f"{outer}transformer.", vpt_rules(), labeled, marker="encoder.encoder_norm.weight"),
        *_layouts("_mae", outer, on_mae, timm, required=("fc_norm.weight",)),
        *_layouts("_timm", outer, timm_rules(), timm, shallow=gated),
    )


PROMPT_LAYOUTS = (ML_VPT_DINOV2, ML_VPT, *_all_layouts(""), *_all_layouts("enc."))
