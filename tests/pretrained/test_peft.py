"""LoRA, rsLoRA and DoRA against PEFT (tools/parity/peft.py), and its files in both directions."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import tiny
from helpers.paths import PARITY
from helpers.prompts import WITHOUT_PROMPTS
from helpers.refusals import Refusal, each
from helpers.tensor_files import changed, write
from helpers.twins import below, error
from safetensors.numpy import load_file, save_file

from mlmoe_jax.config import default_config, load_config, use_adapter
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.models.adapters.catalog import ADAPTERS
from mlmoe_jax.models.backbones.vit import ViT, ViTShape
from mlmoe_jax.models.build import Classifier
from mlmoe_jax.models.heads.linear import LinearHead
from mlmoe_jax.models.params import ModelDef, named_variables
from mlmoe_jax.pretrained.load import load_weights
from mlmoe_jax.pretrained.peft import CONFIG, TENSORS, fill_from_peft, is_peft, read_peft, write_peft
from mlmoe_jax.training.initialization import find_origin
from tools.parity import peft as twins

TOLERANCE = 2e-5
SHAPES = {
    "dinov2": ViTShape(**twins.SHAPE, layer_scale=1.0, mask_token=True),
    "vit": ViTShape(**twins.SHAPE),
}


STORED = dict(np.load(PARITY / "peft.npz"))


def write_adapter(folder, name, part="adapter", **changes):
    """Write the two files of a stored case, with other options."""
    folder.mkdir(exist_ok=True)
    options = json.loads(STORED[f"{name}/config"].tobytes()) | changes
    (folder / CONFIG).write_text(json.dumps(options))
    write(folder / TENSORS, below(STORED, f"{name}/{part}/"))
    return folder


def model_of(folder, name):
    """Return our model of a case with the backbone of transformers and the adapter in `folder`, and its config."""
    kind, adapter, config = twins.CASES[name][0], read_peft(folder), default_config()
    use_adapter(config, adapter.name, **adapter.settings)
    config.model.prompts.kind = "none"
    weights = {key: np.float32(value) for key, value in below(STORED, f"{kind}/").items()}
    vit = nnx.eval_shape(lambda: ViT(SHAPES[kind], rngs=nnx.Rngs(0)))
    load_weights(vit, write(folder / "base.safetensors", weights))
    settings = config.model.adapters[adapter.name]
    own = ADAPTERS[adapter.name].from_config(settings, vit.shape, dtype=None, rngs=nnx.Rngs(1))
    head, adapters = LinearHead(16, 3, rngs=nnx.Rngs(2)), {adapter.name: own}
    model = Classifier(vit, WITHOUT_PROMPTS, head, final_norm=True, precision="highest", adapters=adapters)
    filled = fill_from_peft(model, adapter)
    assert set(filled) == {path for path in named_variables(model) if not path.startswith("backbone/")}
    return model, config


@pytest.mark.variants("name")
@pytest.mark.parametrize("name", twins.CASES)
def test_logits_and_gradients_are_those_of_peft(name, tmp_path):
    model, _ = model_of(write_adapter(tmp_path / "a", name), name)
    definition, params, _ = ModelDef.split(model)

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def slopes_and_logits(own):
        logits = definition.merge(params | own)(twins.images()).logits
        return jnp.square(logits).sum() / 2, logits

    own = {path: value for path, value in params.items() if path.startswith("adapters/")}
    slopes, logits = slopes_and_logits(own)
    assert error(logits, STORED[f"{name}/logits"]) < TOLERANCE
    theirs = read_peft(write_adapter(tmp_path / "b", name, "gradient"))
    assert slopes.keys() == {f"adapters/{theirs.name}/{key}" for key in theirs.tensors}
    for key, value in theirs.tensors.items():
        assert np.abs(value).max() > 1e-3
        assert error(slopes[f"adapters/{theirs.name}/{key}"], value) < TOLERANCE, key


@pytest.mark.parametrize("name", twins.CASES)
def test_written_files_are_read_again(name, tmp_path):
    folder = write_adapter(tmp_path / "a", name)
    count, classifier = write_peft(tmp_path / "b", *model_of(folder, name))
    options, tensors = json.loads((tmp_path / "b" / CONFIG).read_text()), load_file(tmp_path / "b" / TENSORS)
    assert (count, classifier) == (len(tensors), bool(options["modules_to_save"]))
    theirs, options_of_theirs = load_file(folder / TENSORS), json.loads((folder / CONFIG).read_text())
    assert {key: value.shape for key, value in tensors.items()} == {key: value.shape for key, value in theirs.items()}
    for key, value in tensors.items():
        np.testing.assert_allclose(value, theirs[key], rtol=1e-6, atol=1e-6, err_msg=key)
    layers = [layer.rpartition(".")[2] for layer in options.pop("target_modules")]
    assert sorted(layers) == options_of_theirs["target_modules"]
    assert options == {key: options_of_theirs[key] for key in options}


def test_names_of_transformers_4_are_read(tmp_path):
    folder = write_adapter(tmp_path / "a", "lora")
    tensors, ours = load_file(folder / TENSORS), read_peft(folder).tensors
    old = {
        key.replace("q_proj", "attention.query").replace("v_proj", "attention.value"): x for key, x in tensors.items()
    }
    assert old.keys() != tensors.keys()
    save_file(old, folder / TENSORS)
    jax.tree.map(np.testing.assert_array_equal, dict(read_peft(folder).tensors), dict(ours))


def of_files(name: str, says: str, *, tensors=(), call=read_peft, **options) -> Refusal:
    """The two files of a LoRA with other options and other tensors."""

    def make(at):
        folder = write_adapter(at / "a", "lora", **options)
        write(folder / TENSORS, changed(load_file(folder / TENSORS), tensors))
        return folder

    return Refusal(name, make, call, says, writes=call is not read_peft)


def of_model(name: str, says: str, kind="none", **shape) -> Refusal:
    """A LoRA beside prompts of a kind, on a backbone of another shape."""

    def call(folder):
        model, config = model_of(folder, "lora")
        config.model.prompts.kind, model.backbone.shape = kind, replace(model.backbone.shape, **shape)
        write_peft(folder.with_name("written"), model, config)

    return of_files(name, says, call=call)


def of_training(name: str, says: str, options: str) -> Refusal:
    """A training that starts from the files, with these options of its config."""

    def call(folder):
        with pytest.MonkeyPatch.context() as patch:
            tiny.use_vit(patch, patch=32, width=8)
            keys = [("init_from", str(folder)), ("model.backbone.weights", "none")]
            find_origin(load_config(f"lora:dataset=digits{options}", keys)).parts(synthetic_label_space(3, 1))

    return of_files(name, says, call=call)


LAYER, CLASSIFIER = "base_model.model.dinov2.encoder.layer.0.", "base_model.model.classifier.weight"
FIRST, ONES = f"{LAYER}attention.q_proj.lora_A.weight", np.ones((3, 16), np.float32)
REFUSALS = [
    *(
        of_files(name, f"has {name}={json.dumps(value)}, which our adapters cannot represent", **{name: value})
        for name, value in {
            "bias": "all",
            "lora_bias": True,
            "rank_pattern": {"q_proj": 4},
            "init_lora_weights": "pissa",
            "modules_to_save": ["norm"],
            "from_tomorrow": 3,
        }.items()
    ),
    of_files("LoHa", "has peft_type=LOHA, and only LORA can be read, with use_rslora and use_dora", peft_type="LOHA"),
    of_files(
        "no magnitudes", "does not fit adapter_config.json: query/magnitude is missing or unexpected", use_dora=True
    ),
    of_files("no rank", "adapter_config.json is damaged: ", r="x"),
    of_files(
        "another layer",
        "belongs to no layer that our adapters change",
        tensors={f"{LAYER}norm1.lora_A.weight": ONES},
    ),
    of_files("NaN", "has non-finite numbers; use an undamaged file", tensors={FIRST: ONES * np.nan}),
    of_files("one block", "not in all 2 blocks alike, as our adapters do", tensors={FIRST: None}),
    of_files(
        "a classifier of patches",
        "reads the mean of the patches too; remove it",
        tensors={CLASSIFIER: np.tile(ONES, 2)},
        call=lambda folder: model_of(folder, "lora"),
    ),
    of_model("prompts", "PEFT's files hold one LoRA or DoRA and no prompts; choose another --format", kind="deep"),
    of_model("CLIP", "PEFT's files are written for DINOv2 and for ViTs of transformers", pre_norm=True),
    of_training("other settings", "add --config.model.adapters.lora.rank=3 --config.model.adapters.lora.alpha=5.0", ""),
    of_training("another backbone", "query/a has shape (2, 16, 3) instead of (2, 8, 3)", ",rank=3,alpha=5"),
]


@each(REFUSALS)
def test_refusals(case, tmp_path):
    case.check(tmp_path)


def test_a_folder_of_peft_is_recognized(tmp_path):
    assert is_peft(write_adapter(tmp_path / "a", "lora"))
    assert not is_peft(tmp_path)
