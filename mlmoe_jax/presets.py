"""Settings that several config files share: data sets as the papers use them, and ML-VPT with its disagreements.

Where the ML-VPT paper and its authors' code disagree, every disagreement is one key and a preset sets them all. `code`
is the default, because the published numbers come from the code.
"""

from ml_collections import ConfigDict

from mlmoe_jax.errors import UserError

PRESETS = ("code", "paper")
GATE_BIAS = r"^head/(co|dc)/gate/bias$"

# (train, test) splits and the EMA decay a step that the authors' code ends up with on a data set of this size
_BENCHMARKS = {
    "voc2007": ("trainval", "test", 0.9974590),
    "voc2012": ("train", "val", 0.9974590),
    "coco2014": ("train", "val", 0.9998452),
    "nuswide": ("train", "test", 0.9998988),
    "vg256": ("train", "test", 0.9978910),
}


def use_dataset(config: ConfigDict, name: str, root: str, resolution: int) -> None:
    """Set a data set and its splits; the benchmarks select on test, as their papers do.

    Raises UserError for a name without settings here.
    """
    config.data.name, config.data.root, config.data.image_size = name, root, resolution
    if name == "digits":
        config.data.test_splits = ("test", "test_shift")
        return
    if name not in _BENCHMARKS:
        raise UserError(f"dataset={name} is not one of digits, {', '.join(_BENCHMARKS)}")
    train, test, decay = _BENCHMARKS[name]
    config.data.train_split, config.data.val_split, config.data.test_splits = train, "", (test,)
    config.eval.select_on = "test"
    config.eval.batch_size = 64
    config.ema.decay = decay
    config.model.prompts.groups = "published"


def use_ml_vpt(config: ConfigDict, *, preset: str = "code") -> None:
    """Set ML-VPT: group prompts, group-aware experts with a gate a label, two classifiers, 5 groups a side of 3.

    The preset decides, as `code` / `paper`: prompt mask all_prompts / cross_group; experts GELU / ReLU; gate bias
    unused / used; four loss terms / two; mean logit / mean probability. The paper's eq. 16 prints one classifier for
    both sides, but its text and its parameter count say two, so both presets have two.
    """
    if preset not in PRESETS:
        raise UserError(f"preset={preset} is not one of {', '.join(PRESETS)}")
    code = preset == "code"
    config.model.prompts.kind = "group"
    config.model.prompts.mask = "all_prompts" if code else "cross_group"
    config.model.head.kind = "group_experts"
    config.model.head.activation = "gelu" if code else "relu"
    config.model.head.gate_bias = "unused" if code else "used"
    config.model.head.combine = "mean_logit" if code else "mean_probability"
    gate_terms = 1.0 if code else 0.0
    config.loss.terms.update({"logits": 0.0, "co": 1.0, "dc": 1.0, "co_gate": gate_terms, "dc_gate": gate_terms})
    # An unused bias gets no gradient and, as in the authors' code, no decay either.
    config.optim.decay_rules = ((GATE_BIAS, 0.0),) if code else ()
