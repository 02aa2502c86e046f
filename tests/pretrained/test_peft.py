"""LoRA, rsLoRA and DoRA against PEFT (tools/parity/peft.py), and its files in both directions."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.paths import PARITY
from helpers.twins import below, error
from safetensors.numpy import load_file, save_file

from mlmoe_jax.config import default_config, load_config, use_adapter
from mlmoe_jax.data.labels.space import synthetic_label_space
from mlmoe_jax.models.backbones.vit import ViT, ViTShape
from mlmoe_jax.models.build import Classifier
from mlmoe_jax.models.heads.linear import LinearHead
from mlmoe_jax.models.params import ModelDef, named_variables
from mlmoe_jax.models.registries import ADAPTERS
from mlmoe_jax.pretrained.load import load_weights
from mlmoe_jax.pretrained.peft import CONFIG, TENSORS, fill_from_peft, is_peft, peft_files, read_peft
from mlmoe_jax.training.initialization import find_origin
from tools.parity import peft as twins

TOLERANCE = 2e-5
SHAPES = {
    "dinov2": ViTShape(**twins.SHAPE, layer_scale=1.0, mask_token=True),
    "vit": ViTShape(**twins.SHAPE),
}


@pytest.fixture(scope="module")
def stored():
    return dict(np.load(PARITY / "peft.npz"))


def write_adapter(folder, stored, name, part="adapter", **changes):
    """Write the two files of a stored case, with other options."""
    folder.mkdir(exist_ok=True)
    options = json.loads(stored[f"{name}/config"].tobytes()) | changes
    (folder / CONFIG).write_text(json.dumps(options))
    save_file(
        {key: np.ascontiguousarray(value) for key, value in below(stored, f"{name}/{part}/").items()}, folder / TENSORS
    )
    return folder


def model_of(folder, stored, name):
    """Return our model of a case with the backbone of transformers and the adapter in `folder`, and its config."""
    kind, adapter, config = twins.CASES[name][0], read_peft(folder), default_config()
    use_adapter(config, adapter.name, **adapter.settings)
    config.model.prompts.kind = "none"
    weights = {key: np.float32(value) for key, value in below(stored, f"{kind}/").items()}
    save_file({key: np.ascontiguousarray(value) for key, value in weights.items()}, folder / "base.safetensors")
    vit = ViT(SHAPES[kind], rngs=nnx.Rngs(0))
    load_weights(vit, folder / "base.safetensors")
    settings = config.model.adapters[adapter.name]
    own = ADAPTERS[adapter.name].from_config(settings, vit.shape, dtype=None, rngs=nnx.Rngs(1))
    head, adapters = LinearHead(16, 3, rngs=nnx.Rngs(2)), {adapter.name: own}
    model = Classifier(vit, None, head, final_norm=True, precision="highest", adapters=adapters)
    filled = fill_from_peft(model, adapter)
    assert set(filled) == {path for path in named_variables(model) if not path.startswith("backbone/")}
    return model, config


@pytest.mark.variants("name")
@pytest.mark.parametrize("name", twins.CASES)
def test_logits_and_gradients_are_those_of_peft(name, stored, tmp_path):
    model, _ = model_of(write_adapter(tmp_path / "a", stored, name), stored, name)
    definition, params, _ = ModelDef.split(model)

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def slopes_and_logits(own):
        logits = definition.merge(params | own)(twins.images()).logits
        return jnp.square(logits).sum() / 2, logits

    own = {path: value for path, value in params.items() if path.startswith("adapters/")}
    slopes, logits = slopes_and_logits(own)
    assert error(logits, stored[f"{name}/logits"]) < TOLERANCE
    theirs = read_peft(write_adapter(tmp_path / "b", stored, name, "gradient"))
    assert slopes.keys() == {f"adapters/{theirs.name}/{key}" for key in theirs.tensors}
    for key, value in theirs.tensors.items():
        assert np.abs(value).max() > 1e-3
        assert error(slopes[f"adapters/{theirs.name}/{key}"], value) < TOLERANCE, key


@pytest.mark.parametrize("name", twins.CASES)
def test_written_files_are_read_again(name, stored, tmp_path):
    folder = write_adapter(tmp_path / "a", stored, name)
    options, tensors = peft_files(*model_of(folder, stored, name))
    theirs, options_of_theirs = load_file(folder / TENSORS), json.loads((folder / CONFIG).read_text())
    assert {key: value.shape for key, value in tensors.items()} == {key: value.shape for key, value in theirs.items()}
    for key, value in tensors.items():
        np.testing.assert_allclose(value, theirs[key], rtol=1e-6, atol=1e-6, err_msg=key)
    same = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "bias", "modules_to_save")
    assert {key: options[key] for key in same} == {key: options_of_theirs[key] for key in same}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of transformers, in PEFT
@pytest.mark.parametrize("name", twins.CASES)
def test_peft_loads_what_we_write(name, stored, tmp_path):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    model, config = model_of(write_adapter(tmp_path / "a", stored, name), stored, name)
    draw = np.random.default_rng(0)
    for path, (_, variable) in named_variables(model).items():
        if not path.startswith("backbone/"):
            variable.set_value(variable[...] + jnp.asarray(0.1 * draw.normal(size=variable.shape), jnp.float32))
    options, tensors = peft_files(model, config)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / CONFIG).write_text(json.dumps(options))
    save_file(tensors, tmp_path / "b" / TENSORS, {"format": "pt"})
    theirs = peft.PeftModel.from_pretrained(twins.base(twins.CASES[name][0]), tmp_path / "b").eval()
    with torch.no_grad():
        logits = theirs(torch.from_numpy(twins.images()).permute(0, 3, 1, 2)).logits.numpy()
    assert error(model(twins.images()).logits, logits) < TOLERANCE
    assert error(logits, stored[f"{name}/logits"]) > 1e-2, "other values than the stored ones"


def test_names_of_transformers_4_are_read(stored, tmp_path):
    folder = write_adapter(tmp_path / "a", stored, "lora")
    tensors, ours = load_file(folder / TENSORS), read_peft(folder).tensors
    old = {
        key.replace("q_proj", "attention.query").replace("v_proj", "attention.value"): x for key, x in tensors.items()
    }
    assert old.keys() != tensors.keys()
    save_file(old, folder / TENSORS)
    jax.tree.map(np.testing.assert_array_equal, dict(read_peft(folder).tensors), dict(ours))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"bias": "all"}, 'has bias="all", which our adapters cannot represent'),
        ({"lora_bias": True}, "has lora_bias=true, which our adapters cannot represent"),
        ({"rank_pattern": {"q_proj": 4}}, 'has rank_pattern={"q_proj": 4}, which our adapters cannot represent'),
        ({"init_lora_weights": "pissa"}, 'has init_lora_weights="pissa", which our adapters cannot represent'),
        ({"modules_to_save": ["norm"]}, 'has modules_to_save=["norm"], which our adapters cannot represent'),
        ({"from_tomorrow": 3}, "has from_tomorrow=3, which our adapters cannot represent"),
        ({"peft_type": "LOHA"}, "has peft_type=LOHA, and only LORA can be read, with use_rslora and use_dora"),
        ({"use_dora": True}, "does not fit adapter_config.json: query/magnitude is missing or unexpected"),
        ({"r": "x"}, "adapter_config.json is damaged: "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_ours_cannot_represent_is_refused_by_name(changes, sentence, stored, tmp_path, refusal):
    assert sentence in refusal(read_peft, write_adapter(tmp_path / "a", stored, "lora", **changes))


def test_tensors_that_do_not_fit_are_refused(stored, tmp_path, refusal):
    folder = write_adapter(tmp_path / "a", stored, "lora")
    tensors = load_file(folder / TENSORS)
    first = next(key for key in tensors if "layer.0" in key)
    for change, sentence in (
        (
            {"base_model.model.dinov2.encoder.layer.0.norm1.lora_A.weight": tensors[first]},
            "belongs to no layer that our",
        ),
        ({first: tensors[first] * np.nan}, "has non-finite numbers; use an undamaged file"),
        ({first: None}, "not in all 2 blocks alike, as our adapters do"),
    ):
        changed = {key: value for key, value in (tensors | change).items() if value is not None}
        save_file(changed, folder / TENSORS)
        assert sentence in refusal(read_peft, folder)
    wide = np.ones_like(tensors["base_model.model.classifier.weight"])
    save_file(tensors | {"base_model.model.classifier.weight": wide}, folder / TENSORS)
    assert "reads the mean of the patches too; remove it" in refusal(model_of, folder, stored, "lora")


def test_models_without_such_files_are_refused(stored, tmp_path, refusal):
    model, config = model_of(write_adapter(tmp_path / "a", stored, "lora"), stored, "lora")
    config.model.prompts.kind = "deep"
    assert refusal(peft_files, model, config).startswith("PEFT's files hold one LoRA or DoRA and no prompts; choose")
    config.model.prompts.kind = "none"
    model.backbone.shape = ViTShape(**twins.SHAPE, pre_norm=True)
    assert refusal(peft_files, model, config).startswith("PEFT's files are written for DINOv2 and for ViTs of transfor")


def test_a_training_starts_from_a_folder_of_peft(stored, tmp_path, refusal):
    folder = write_adapter(tmp_path / "a", stored, "lora")
    assert is_peft(folder)
    assert not is_peft(tmp_path)
    keys = [("init_from", str(folder)), ("model.backbone.weights", "none")]
    sentence = refusal(find_origin, load_config("lora:dataset=digits", keys))
    assert sentence.endswith("add --config.model.adapters.lora.rank=3 --config.model.adapters.lora.alpha=5.0")
    config = load_config("lora:dataset=digits,rank=3,alpha=5", keys)
    assert "query/a has shape (2, 16, 3) instead of (5, 128, 3)" in refusal(
        find_origin(config).parts, synthetic_label_space(3, 1)
    )
