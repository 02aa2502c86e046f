"""One check of the whole configuration."""

from ml_collections import ConfigDict

from mlmoe_jax.config.loading import flatten
from mlmoe_jax.errors import UserError
from mlmoe_jax.models.prompts import SIDES
from mlmoe_jax.pretrained.torch_file import SUFFIXES as TORCH_SUFFIXES

_CHOICES = {
    "data.resize": ("square", "crop"),
    "data.bad_images": ("error", "skip"),
    "augment.where": ("device", "host"),
    "augment.geometry": ("none", "random_resized_crop", "multi_scale_crop"),
    "augment.randaugment": ("none", "uda", "standard"),
    "data.difficult": ("negative", "ignore", "positive"),
    "model.dtype": ("float32", "bfloat16"),
    "model.frozen_dtype": ("float32", "bfloat16"),
    "model.backbone.normalization": ("auto", "imagenet"),
    "model.backbone.final_norm": ("auto", "yes", "no"),
    "model.backbone.batch_norm": ("frozen", "running", "trainable"),
    "model.matmul_precision": ("default", "high", "highest"),
    "model.prompts.kind": ("none", "deep", "shallow", "e2vpt", "group"),
    "model.prompts.masks": ("none", "learned", "fixed"),
    "model.prompts.pruned": ("absent", "zeroed"),
    "model.prompts.sides": tuple(SIDES),
    "model.prompts.mask": ("none", "all_prompts", "cross_group"),
    "model.head.kind": (
        "linear",
        "group_experts",
        "group_linear",
        "query",
        "routed_experts",
        "ml_gcn",
        "add_gcn",
        "cnn_rnn",
    ),
    "model.head.gates_of": ("label", "group"),
    "model.head.pool": ("cls", "patches", "both"),
    "model.head.activation": ("gelu", "relu"),
    "model.head.gate_bias": ("unused", "used"),
    "model.head.combine": ("mean_logit", "mean_probability"),
    "model.head.decoder.self_attention": ("all", "first", "others", "none", "identity"),
    "model.head.decoder.query_role": ("input", "added"),
    "model.head.decoder.positions": ("once", "detr", "learned", "none"),
    "model.head.decoder.activation": ("relu", "gelu"),
    "model.head.decoder.project": ("auto", "linear", "linear_relu", "none"),
    "model.head.decoder.init": ("xavier", "torch"),
    "model.head.routing.expert": ("relu_linear", "ffn", "ffn_relu"),
    "model.head.routing.gate": ("mlp", "linear", "static"),
    "model.head.routing.gate_share": ("per_label", "shared"),
    "model.head.routing.spread": ("compiler", "shard_map"),
    "model.head.routing.classifier": ("per_label", "shared"),
    "model.head.routing.entropy": ("maximize", "paper", "off"),
    "loss.kind": ("asymmetric", "bce", "focal", "softmax"),
    "loss.reduce": ("mean", "sum"),
    "optim.name": ("adamw", "adam", "sgd", "muon"),
    "optim.schedule": ("one_cycle", "cosine", "constant", "multi_step"),
    "eval.select_on": ("val", "test", "none"),
    "metrics.preset": ("none", "mlvpt", "q2l", "mlgcn", "asl", "drmoe"),
    "thresholds.per": ("class", "global"),
    "thresholds.goal": ("f1", "precision"),
    "prune.importance": ("signed", "absolute"),
    "checkpoint.include_frozen": ("auto", "always", "never"),
}


_POSITIVE = (
    "data.image_size",
    "data.crop_fraction",
    "data.labels",
    "data.threads",
    "model.prompts.num_groups",
    "model.prompts.per_group",
    "model.prompts.segments",
    "model.prompts.tau_co",
    "model.prompts.tau_dc",
    "model.head.expert_hidden",
    "model.head.decoder.heads",
    "model.head.decoder.hidden",
    "model.head.decoder.decoder_layers",
    "model.head.routing.expert_hidden",
    "model.head.routing.gate_hidden",
    "model.head.graph.hidden",
    "model.head.graph.vector_width",
    "model.head.sequence.embedding",
    "model.head.sequence.hidden",
    "model.head.sequence.beam_width",
    "model.head.sequence.max_labels",
    "loss.scale",
    "optim.learning_rate",
    "pack.shard_images",
    "pack.quality",
    "train.epochs",
    "train.batch_size",
    "train.accumulate",
    "train.log_every",
    "eval.batch_size",
    "eval.every_epochs",
    "metrics.top_k",
    "metrics.calibration_bins",
    "metrics.pair_level",
    "metrics.pair_support",
    "metrics.pair_images",
    "report.sample_side",
    "checkpoint.every_epochs",
    "checkpoint.keep",
)


_RULES = ("trainable", "optim.rate_rules", "optim.decay_rules", "optim.muon_rules")


_FRACTION = (
    "data.val_fraction",
    "data.crop_fraction",
    "augment.shift",
    "augment.contrast",
    "augment.brightness",
    "augment.saturation",
    "augment.cutout",
    "model.prompts.dropout",
    "model.head.decoder.dropout",
    "model.head.sequence.dropout",
    "model.head.graph.threshold",
    "model.head.graph.share",
    "ema.decay",
    "eval.threshold",
    "metrics.top_k_minimum",
    "metrics.pair_level",
    "thresholds.precision",
)


def validate(config: ConfigDict) -> None:
    """Raise one UserError that lists every mistake in the config."""
    flat = flatten(config)
    wrong = [
        f"{key} is {flat[key]!r}, which is none of {', '.join(choices)}"
        for key, choices in _CHOICES.items()
        if flat[key] not in choices
    ]
    wrong += [f"{key} is {flat[key]!r} and must be above 0" for key in _POSITIVE if not flat[key] > 0]
    wrong += [f"{key} is {flat[key]!r} and must be within 0 and 1" for key in _FRACTION if not 0 <= flat[key] <= 1]
    wrong += [
        f"{key} is {flat[key]!r} and must be (regex, value) pairs"
        for key in _RULES
        if not all(isinstance(rule, tuple | list) and len(rule) == 2 for rule in flat[key])
    ]
    wrong += _model_mistakes(config)
    if config.data.val_fraction and not config.data.val_split:
        wrong.append("data.val_fraction holds out data.val_split, which is empty")
    counts = (
        "data.workers",
        "pack.short_side",
        "pack.processes",
        "augment.margin",
        "model.prompts.count",
        "model.prompts.project",
        "model.prompts.key_values",
        "prune.keep_segments",
        "report.samples",
        "model.head.decoder.width",
        "model.head.decoder.encoder_layers",
        "model.head.decoder.queries",
        "model.head.routing.shared_experts",
        "model.head.routing.task_experts",
    )
    wrong += [f"{key} is {flat[key]!r} and must be 0 or more" for key in counts if flat[key] < 0]
    for key in ("augment.crop_scale", "augment.crop_ratio"):
        pair = flat[key]
        if not (len(pair) == 2 and all(isinstance(v, int | float) for v in pair) and 0 < pair[0] <= pair[1]):
            wrong.append(f"{key} is {pair!r} and must be two numbers above 0, the smaller one first")
    for key in ("prune.token_levels", "prune.segment_levels", "optim.milestones"):
        if not flat[key] or not all(isinstance(v, int | float) and 0 <= v < 1 for v in flat[key]):
            wrong.append(f"{key} is {flat[key]!r} and must be shares from 0 to below 1")
    if config.data.bad_images == "skip" and config.model.backbone.batch_norm == "trainable":
        wrong.append(
            "model.backbone.batch_norm=trainable would count the blanks that data.bad_images=skip leaves, so take "
            "batch_norm=running, or leave bad images out with --mode=pack"
        )
    if config.pack.quality > 100:
        wrong.append(f"pack.quality is {config.pack.quality} and must be at most 100")
    if config.eval.select_on == "val" and not config.data.val_split:
        wrong.append("eval.select_on=val needs data.val_split")
    if config.eval.select_on == "test" and not config.data.test_splits:
        wrong.append("eval.select_on=test needs data.test_splits")
    if not config.data.val_split and not config.data.test_splits:
        wrong.append("data.val_split and data.test_splits are both empty, so that there is nothing to evaluate")
    if wrong:
        raise UserError("the config has mistakes: " + "; ".join(wrong))


def warnings(config: ConfigDict) -> list[str]:
    """Return what a valid config does that is hardly meant."""
    routing = config.model.head.routing
    if config.model.head.kind == "routed_experts" and routing.entropy == "paper" and routing.entropy_weight > 0:
        return [
            "model.head.routing.entropy=paper adds the entropy of the gates to the loss as DR-MoE prints it, which "
            "drives every gate to one expert, the opposite of what it is said to be for; maximize has the other sign"
        ]
    return []


def _model_mistakes(config: ConfigDict) -> list[str]:
    """Return what does not fit together between prompts, head and loss."""
    head, prompts, wrong = config.model.head, config.model.prompts, []
    if head.kind in ("group_experts", "group_linear") and prompts.kind != "group":
        wrong.append(f"model.head.kind={head.kind} reads group prompts: set model.prompts.kind=group")
    pooled = {"cls", "patches"} if head.pool == "both" else {head.pool}
    sides = SIDES.get(prompts.sides, ())
    produced = {
        "linear": {"logits", *pooled},
        "group_linear": {"logits", *sides},
        "group_experts": {"logits", *sides, *(f"{side}_gate" for side in sides)},
        "add_gcn": {"logits", "map", "graph"},
    }
    terms = {name for name, weight in config.loss.terms.items() if weight}
    if head.kind == "cnn_rnn":
        produced["cnn_rnn"] = set()  # its loss is that of the sequence
    elif not terms:
        wrong.append("loss.terms has no term with a weight other than 0")
    if missing := terms - produced.get(head.kind, {"logits"}):
        wrong.append(f"loss.terms names {', '.join(sorted(missing))}, which head {head.kind} does not give")
    if head.kind == "routed_experts" and not head.routing.shared_experts + head.routing.task_experts:
        wrong.append("model.head.routing.shared_experts and task_experts are both 0, and a label needs an expert")
    if head.kind == "routed_experts" and head.decoder.queries:
        wrong.append("model.head.decoder.queries is for head query; routed_experts has a query a label")
    if prompts.kind in ("deep", "shallow", "e2vpt") and not prompts.count:
        wrong.append(f"model.prompts.count is 0: for no prompts at all set model.prompts.kind=none, not {prompts.kind}")
    if (
        head.kind == "ml_gcn"
        and config.init_from.endswith((".npz", ".safetensors", *TORCH_SUFFIXES))
        and not head.graph.word_vectors
    ):
        wrong.append(
            "config.init_from is a file of ML-GCN's, which was trained with GloVe vectors: name them with "
            "model.head.graph.word_vectors"
        )
    kept = (prompts.kept_tokens, *prompts.kept_segments)
    if any(set(row) - {"0", "1"} for row in kept):
        wrong.append("model.prompts.kept_tokens and kept_segments are made of the digits 0 and 1")
    sizes = {len(row) for row in prompts.kept_segments}
    if (prompts.kept_tokens and len(prompts.kept_tokens) != prompts.count) or (
        prompts.kept_segments and (len(prompts.kept_segments) != prompts.count or sizes != {prompts.segments})
    ):
        wrong.append(
            f"model.prompts.kept_tokens must have {prompts.count} digits, and kept_segments {prompts.count} rows of "
            f"{prompts.segments}"
        )
    return wrong
