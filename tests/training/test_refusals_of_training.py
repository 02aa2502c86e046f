"""What a training refuses: settings that contradict each other, sources of initial values, and data that do not fit."""

from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import scored_run, tiny
from helpers.refusals import Refusal, each, run_command
from helpers.runs import published_config, recipe, write_published

from mlmoe_jax.config import load_config, validate
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.models.mosaics import split_cells
from mlmoe_jax.models.outputs import Features
from mlmoe_jax.runs.assemble import assemble
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.training import loop, optim
from mlmoe_jax.training.import_run import import_run
from mlmoe_jax.training.initialization import find_origin
from mlmoe_jax.training.label_prior import read_prior
from mlmoe_jax.training.logistic.penalty_search import fit_logistic
from mlmoe_jax.training.loop import train
from mlmoe_jax.training.profiling import Window
from mlmoe_jax.training.selection import require_metric

pytestmark = pytest.mark.usefixtures("run")  # few scenes of digits, and tiny backbones
SPACE = synthetic_label_space(4, 2)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Paths are relative to the folder of the case."""
    monkeypatch.chdir(tmp_path)


def of_training(
    name: str, *says: str, make=None, kind: str = "probe", profile: Window | None = None, **keys
) -> Refusal:
    """A training with some keys of the config, which makes no run folder."""
    return Refusal(name, make, lambda at: train(recipe(kind, **keys), RunFolder(at / "run"), profile=profile), *says)


def of_config(name: str, reference: str, says: str, **keys: str) -> Refusal:
    """A config with some keys, given as text."""
    overrides = [(key.replace("__", "."), value) for key, value in keys.items()]
    return Refusal(name, None, lambda at: validate(load_config(reference, overrides)), says)


def text(name: str) -> Callable[[Path], None]:
    """Write a file of text."""
    return lambda at: (at / name).write_text("not tensors") and None


def weights(name: str, **shape) -> Callable[[Path], None]:
    """Write the weights of a ViT."""
    return lambda at: tiny.write_weights(at / name, tiny.entry(patch=32, **shape))


def other_run(at: Path) -> None:
    """Write a run on another backbone."""
    write_published(RunFolder(at / "other"), published_config())


# Refused before the data are opened.
EARLY = [
    of_training("an unknown metric", "did you mean 'mAP_envelope'", eval__select_metric="mAP_envelop"),
    of_training("no file of weights", "cannot read none.npz: No such file", model__backbone__weights="none.npz"),
    of_training(
        "text as weights",
        "text.safetensors is damaged: ",
        make=text("text.safetensors"),
        model__backbone__weights="text.safetensors",
    ),
    of_training(
        "weights of a wider model",
        "does not fit the model",
        make=weights("wide.safetensors", width=32),
        model__backbone__weights="wide.safetensors",
    ),
    of_training("no source", "'nothing', which is neither a file of weights nor a run folder", init_from="nothing"),
    of_training("no file as the source", "there is no weights file nothing.pth", init_from="nothing.pth"),
    of_training(
        "an empty folder",
        "empty is not the run folder of a training: it has no config.json",
        make=lambda at: (at / "empty").mkdir(),
        init_from="empty",
    ),
    of_training("text as the source", "it is no file of torch.save", make=text("text.pth"), init_from="text.pth"),
    of_training(
        "a backbone as the source",
        "does not hold a whole model",
        make=weights("backbone.safetensors"),
        init_from="backbone.safetensors",
    ),
    of_training(
        "a run on another backbone",
        "config.init_from=other is a run on tiny, and this one is on vit_digits; both must have the same",
        make=other_run,
        init_from="other",
    ),
]


@each(EARLY)
def test_what_is_found_before_the_data_are_opened(case, tmp_path, monkeypatch):
    def opened(*_, **__):
        raise AssertionError("the data was opened")

    monkeypatch.setattr(loop, "open_training_data", opened)
    case.check(tmp_path)


# ------------------------------------------------------------------------------------------------------- the others
PROBE, CACHED = "linear_probe:dataset=digits", {"data__cache_features": "float32"}
LOGISTIC = {"data__cache_features": "float32", "loss__kind": "bce", "train__fit": "logistic", "eval__select_on": "none"}
ONE = {"data__known_positives": "one", "loss__expected_positives": 2.0, "loss__large_loss_rate": 0.05}
COUNT = "steps count from 1, and at most 100 are traced"
NO_HEAD = ((r"^backbone/", False), (r"bias", False), (r"", True))


def of_metric(name: str, metric: str, *says: str) -> Refusal:
    """A metric that is to select the weights, with the preset of ML-VPT."""
    config = {"metrics__preset": "mlvpt", "eval__select_metric": metric}
    return Refusal(
        name,
        None,
        lambda at: require_metric(recipe("probe", **config)),
        f"eval.select_metric is '{metric}' and must be",
        *says,
    )


def of_file(
    name: str, *says: str, tensors: dict | None = None, call=find_origin, reference: str = PROBE, **keys: str
) -> Refusal:
    """A file a.npz or a.pth.tar that initial values are read from; without tensors it is empty."""

    def make(at: Path) -> None:
        (at / "a.pth.tar").touch() if tensors is None else np.savez(at / "a.npz", **tensors)

    overrides = [(key.replace("__", "."), value) for key, value in keys.items()]
    return Refusal(name, make, lambda at: call(load_config(reference, overrides)), *says)


def of_prior(name: str, prior: str, says: str) -> Refusal:
    """A prior of the labels a, b and c: a run, or a file with a and b."""

    def make(at: Path) -> None:
        scored_run.write_run(at / "unscored", scored_run.drawn_split("val"))
        (at / "prior.csv").write_text("Classes,avg_pred\nb,0.25\na,0.5\n")

    return Refusal(name, make, lambda at: read_prior(recipe("probe", loss__prior=prior), "abc"), says)


def of_command(name: str, says: str, *flags: str) -> Refusal:
    """A command that writes features."""
    return Refusal(name, None, lambda at: run_command("--mode=features", *(flags or [f"--config={PROBE}"])), says)


def of_optimizer(name: str, says: str, **keys) -> Refusal:
    """Settings of the optimizer, for a training of 40 steps."""
    call = lambda at: optim.make_optimizer(recipe("probe", **keys).optim, 40, {"head/bias": (3,)})  # noqa: E731
    return Refusal(name, None, call, says)


REFUSALS = [
    # cached features
    of_config(
        "augmented features",
        PROBE,
        "without augmentation: set augment.flip=False, augment.cutout=0.0",
        augment__flip="True",
        augment__cutout="0.5",
        **CACHED,
    ),
    of_config("features of RandAugment", PROBE, "augment.randaugment=none", augment__randaugment="uda", **CACHED),
    of_config("features of other colors", PROBE, "set augment.hue=0.0", augment__hue="0.1", **CACHED),
    of_config("features with deep prompts", "vpt:dataset=digits", "but deep prompts change them", **CACHED),
    of_config(
        "features that depend on the batch",
        PROBE,
        "do not depend on the batch",
        model__backbone__name="resnet50",
        model__backbone__batch_norm="trainable",
        **CACHED,
    ),
    of_training("features of a trained backbone", "needs a frozen backbone, but", trainable=((r"", True),), **CACHED),
    of_command("features without a folder", "the following arguments are required: --output"),
    of_command("features of prompts", "needs a backbone without deep prompts", "--config=vpt", "--output=out"),
    # a fit to convergence
    of_config(
        "a fit of patches",
        PROBE,
        "fits one linear classifier: set model.head.kind=linear, pool=cls",
        model__head__pool="patches",
        **LOGISTIC,
    ),
    of_config("a fit of queries", PROBE, "fits one linear classifier", model__head__kind="query", **LOGISTIC),
    of_config(
        "a fit of images",
        PROBE,
        "needs fixed features: set data.cache_features=float32, or train.fit=steps",
        **LOGISTIC | {"data__cache_features": "no"},
    ),
    of_config(
        "a fit of another loss",
        PROBE,
        "minimizes bce and leaves out unknown labels: set loss.kind=bce",
        **LOGISTIC | {"loss__kind": "asymmetric"},
    ),
    of_config("a fit with weights", PROBE, "minimizes bce", loss__positive_weight="2", **LOGISTIC),
    of_training(
        "a fit without the bias",
        "nothing else, but config.trainable differs in head/classifier/bias",
        kind="logistic",
        trainable=NO_HEAD,
    ),
    of_training("a trace of a fit", "--profile traces steps", kind="logistic", profile=Window(1, 1)),
    Refusal(
        "a fit to one image",
        None,
        lambda at: fit_logistic(np.ones((1, 5)), np.ones((1, 2), np.int8)),
        "two images or more, of two groups",
    ),
    Refusal(
        "a fit to one group",
        None,
        lambda at: fit_logistic(np.ones((3, 5)), np.ones((3, 2), np.int8), units=["p"] * 3),
        "two images or more, of two groups",
    ),
    # losses
    of_training(
        "unknown labels of bce",
        "which loss.kind=bce leaves out: set loss.unknown=negative",
        **ONE | {"loss__kind": "bce"},
    ),
    of_training("two known positives", "data.known_positives is 'two'", data__known_positives="two"),
    of_training(
        "no number of positives",
        "needs loss.expected_positives",
        **ONE | {"loss__kind": "epr", "loss__expected_positives": 0.0},
    ),
    of_training(
        "a loss that learns from what is left out",
        "learns from unknown labels",
        loss__kind="ll_r",
        loss__unknown="ignore",
        **ONE,
    ),
    of_training(
        "large losses of mixed images",
        "needs the labels of single images",
        loss__kind="ll_r",
        augment__mix="mixup",
        **ONE,
    ),
    of_training(
        "estimates of mixed images", "needs the labels of single images", loss__kind="role", augment__mix="mixup", **ONE
    ),
    of_training(
        "difficult labels of hill",
        "makes difficult labels unknown",
        loss__kind="hill",
        data__difficult_train="ignore",
        **ONE,
    ),
    of_training(
        "large losses of known labels",
        "of the training labels, of which 0.0% are unknown",
        **ONE | {"loss__kind": "ll_r", "data__known_positives": "all"},
    ),
    of_training(
        "too many corrections",
        "of the training labels, of which",
        **ONE | {"loss__kind": "ll_ct", "loss__large_loss_rate": 0.9, "train__epochs": 3},
    ),
    of_prior("a prior of a run without scores", "unscored", "run mlmoe eval --workdir="),
    of_prior("a prior without a label", "prior.csv", "has no prior for 1 labels, the first is c"),
    # mixed images
    of_config(
        "mixed sequences of labels",
        "cnn_rnn_resnet101:dataset=digits",
        "reads as a sequence: set augment.mix=none",
        augment__mix="cutmix",
    ),
    of_config("rectangles of features", PROBE, "needs images: set augment.mix=mixup", augment__mix="cutmix", **CACHED),
    of_config(
        "mosaics of parts of a batch",
        "splicemix_resnet101:dataset=digits",
        "set train.accumulate=1, batch_size=4 or more",
        augment__mix="splicemix",
        train__accumulate="2",
    ),
    of_config(
        "a fit of mixed images", PROBE, "no steps whose batches are mixed", augment__mix="cutmix", train__fit="logistic"
    ),
    Refusal(
        "mosaics without a map",
        None,
        lambda at: split_cells(Features(jnp.ones((6, 5)), None, None, (4, 4)), 1),
        "reads only the feature map",
    ),
    # steps
    of_optimizer(
        "a warm-up without an end",
        "warmup_steps is 40, but the whole training has 40 steps",
        optim__schedule="cosine",
        optim__warmup_steps=40,
    ),
    of_optimizer("a rule that is no regular expression", "not a regular expression", optim__rate_rules=(("(", 1.0),)),
    *(
        Refusal(
            f"a trace of {text!r}",
            None,
            lambda at, text=text: Window.parse(text),
            f"--profile={text} should be the first and the last step to trace, such as --profile=10:12; {COUNT}",
        )
        for text in ("", "5", "5:", ":5", "0:3", "4:3", "a:b", "1:2:3", "-1:2", "1.0:2", "٣:٤", "1:101")
    ),
    # The progress, which would announce a long first step seconds later, ends: helpers/budget.py finds timers.
    Refusal(
        "a trace of a training beyond its end",
        None,
        lambda at: train(recipe("probe"), RunFolder(at / "run"), profile=Window(99, 99)),
        "within the remaining steps, 1 to 6",
        writes=True,
    ),
    Refusal(
        "a trace beyond the end", None, lambda at: Window(3, 5).require(0, 4), "within the remaining steps, 1 to 4"
    ),
    Refusal(
        "a trace of what is done", None, lambda at: Window(3, 5).require(3, 9), "within the remaining steps, 4 to 9"
    ),
    # metrics that select
    of_metric("a metric that is misspelled", "mAP_envelop", "; did you mean 'mAP_envelope'?"),
    of_metric("an error", "ECE_macro", "; did you mean 'AUC_macro'?"),
    of_metric("a distance", "Brier_pooled", "mlvpt/OF1@top3"),
    of_metric("a metric of another preset", "q2l/mAP", "; did you mean 'mlvpt/mAP'?"),
    of_metric("a metric at another number", "mAP@5", "; did you mean 'mAP@3'?"),
    # initial values
    of_file(
        "a head as a backbone",
        "(ml_decoder layout) holds a head",
        tensors={"decoder.duplicate_pooling": np.zeros((4, 8, 1), np.float32)},
        call=lambda config: assemble(config, SPACE),
        model__backbone__weights="a.npz",
    ),
    of_file(
        "a published file without its vectors",
        "trained with GloVe vectors; name the file with model.head.graph.word_vectors",
        reference="mlgcn_resnet101",
        init_from="a.pth.tar",
    ),
    of_file(
        "an empty published file",
        "a.pth.tar is damaged",
        reference="mlgcn_resnet101",
        init_from="a.pth.tar",
        model__head__graph__word_vectors="glove.txt",
    ),
    Refusal(
        "an import without a source",
        None,
        lambda at: import_run(recipe("probe"), RunFolder(at)),
        "mlmoe import needs --config.init_from=FILE",
    ),
    Refusal(
        "an import over a run",
        other_run,
        lambda at: import_run(recipe("probe", init_from="in.npz"), RunFolder(at / "other")),
        "other already holds a run; choose another --workdir",
    ),
]


@each(REFUSALS)
def test_refusals(case, tmp_path):
    case.check(tmp_path)
