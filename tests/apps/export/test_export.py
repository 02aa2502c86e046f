"""Exported programs: the same probabilities as the run, in a process that has no code of ours."""

import json
import runpy
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers.color_server import client_of
from helpers.devices import run_python
from helpers.documents import blocks
from helpers.drawn_images import noise
from helpers.exported import CNNS, ON_RESNET, ON_VIT, model_of, operations, random_run
from helpers.label_trees import violations
from helpers.paths import REPOSITORY
from helpers.runs import CALIBRATION, CLASSES, scores_by
from helpers.tables import ImageTable
from PIL import Image
from safetensors.numpy import load_file, safe_open

from mlmoe_jax import load_config
from mlmoe_jax.apps.export import run as export
from mlmoe_jax.apps.export import standalone
from mlmoe_jax.apps.export.mlmoe_pyfunc import LabelTable
from mlmoe_jax.apps.export.program import image_shape, outputs_of, program_of, require_equal
from mlmoe_jax.apps.export.targets import ALWAYS, PROBABILITY, TARGETS, Export
from mlmoe_jax.apps.serving.labeler import Labeler
from mlmoe_jax.apps.serving.service import Service
from mlmoe_jax.data.image_reader import ImageReader
from mlmoe_jax.data.images import ArrayImages
from mlmoe_jax.data.label_tree import LabelTree
from mlmoe_jax.inference.predictor import Predictor
from mlmoe_jax.models.apply import apply_model
from mlmoe_jax.models.calibration import Calibration
from mlmoe_jax.models.consistency import Consistency, Scores
from mlmoe_jax.pretrained.peft import CONFIG, read_peft
from mlmoe_jax.runs.assemble import abstract_parts, assemble
from mlmoe_jax.runs.decisions import Thresholds, read_thresholds, write_thresholds
from mlmoe_jax.runs.folder import RunFolder

PROGRAMS = [block.text for block in blocks(REPOSITORY / "docs" / "deployment.md", "python", "Export")]
RUN = "runs/digits"  # as in the page
LIMITS = {"a": 0.25, "b": float("inf"), "c": 0.5}
OURS = ("mlmoe_jax", "flax", "orbax", "ml_collections", "grain", "etils")
# Begins a program in the exported folder, which stays as it is; the modules of OURS cannot be imported.
_APART = f"""
import sys
sys.dont_write_bytecode = True
sys.modules.update(dict.fromkeys({OURS}))
"""
_FRESH = f"""{_APART}
folder, images, scores, *paths = sys.argv[1:]
sys.path.insert(0, folder)
import numpy as np
from load import Model
model = Model()
pixels = np.load(images)
found = {{str(size): model(pixels[:size]) for size in (1, 2, 5)}}
np.savez(scores, read=model(np.stack([model.read(path) for path in paths])), **found)
"""


@pytest.fixture(scope="module")
def made(runs, tmp_path_factory):
    """A run, one image file of each kind, and the exported folder."""
    folder = tmp_path_factory.mktemp("exported")
    changes = {"model__frozen_dtype": "bfloat16", "model__head__graph__word_vectors": f"{folder}/vectors.txt"}
    with runs.world():
        run = runs("published", **changes).copy(folder / RUN).folder
        write_thresholds(run, Thresholds(LIMITS, calibration=CALIBRATION))
        assert export.export_run(run, str(folder / "out"), "stablehlo").exit_code == 0
        yield folder


def image_files(folder: Path) -> list[str]:
    """Files of every kind that a reader has to treat in its own way."""
    draw = np.random.default_rng(3).integers
    photo = Image.fromarray(draw(0, 256, (30, 20, 3)).astype(np.uint8))
    turned = Image.Exif()
    turned[0x0112] = 6
    photo.save(folder / "turned.jpg", exif=turned)
    Image.fromarray(draw(0, 256, (9, 31, 4)).astype(np.uint8), "RGBA").save(folder / "transparent.png")
    photo.convert("L").save(folder / "gray.png")
    photo.quantize(8).save(folder / "palette.gif")
    return [str(folder / name) for name in ("turned.jpg", "transparent.png", "gray.png", "palette.gif")]


def test_a_program_gives_the_scores_of_the_predictor_without_our_code(made, tmp_path):
    predictor, pixels, paths = Predictor.from_run(made / RUN), noise(13), image_files(tmp_path)
    np.save(tmp_path / "images.npy", pixels)
    run_python(_FRESH, made / "out", tmp_path / "images.npy", tmp_path / "scores.npz", *paths)
    found, labeled = np.load(tmp_path / "scores.npz"), scores_by(predictor, pixels)
    expected = {"read": scores_by(predictor, paths)} | {str(count): labeled[:count] for count in (1, 2, 5)}
    for name, scores in expected.items():
        np.testing.assert_allclose(found[name], scores, atol=1e-6, rtol=0, err_msg=name)
        assert found[name].dtype == np.float32
    np.testing.assert_allclose(outputs_of(predictor.run, pixels)[PROBABILITY], labeled, atol=1e-6)
    assert np.ptp(found["5"], axis=0).min() > 1e-3, "the scores depend on the image"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["stablehlo", "onnx"])
def test_a_program_gives_scores_that_agree_with_a_tree(form, small_backbones, tmp_path):
    if form == "onnx":
        pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    tree, run = LabelTree(((0, 1), (2, 1), (3, 2), (3, 4)), ((0, 2), (4, 5))), random_run("linear_probe", **ON_VIT)
    pixels = noise(16, 32)
    corrected = replace(run, scores=Scores(Calibration(scale=np.linspace(1, 2, 6), offset=np.full(6, 0.1))))
    before = outputs_of(corrected, pixels)[PROBABILITY]
    consistency = Consistency.of(tree, np.median(before, axis=0), 6)
    job = Export(replace(corrected, scores=replace(corrected.scores, consistency=consistency)), tmp_path, {}, ALWAYS)
    TARGETS[form].write(job)
    scores = TARGETS[form].load(tmp_path)(pixels)[PROBABILITY]
    np.testing.assert_allclose(scores, outputs_of(job.run, pixels)[PROBABILITY], atol=1e-6)
    assert violations(tree, before, consistency.limits) > violations(tree, scores, consistency.limits) == 0


def test_the_folder_describes_itself(made):
    out = made / "out"
    names = {"model.stablehlo", "weights.safetensors", "model.json", "load.py", "README.md"}
    assert {path.name for path in out.iterdir()} == names
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1, "no file is for its owner only"
    described = json.loads((out / "model.json").read_text())
    about = {"labels": list(CLASSES), "thresholds": [0.25, None, 0.5], "calibrated_on": "val"}
    assert described.items() >= about.items()
    assert described["input"]["shape"] == ["B", 8, 8, 3]
    assert described["model"]["head"]["graph"]["word_vectors"] == "", "a path on this machine"
    assert str(made) not in (out / "model.json").read_text() + (out / "README.md").read_text()
    assert model_of(out).thresholds.tolist() == [0.25, np.inf, 0.5]


def test_a_program_takes_pixels_alone(made, refusal):
    floats = np.zeros((1, 8, 8, 3))
    assert "uint8 [B,8,8,3], not float64" in refusal(model_of(made / "out"), floats, error=ValueError)


@pytest.mark.budget(25)
def test_pad_and_flips_give_one_score_in_every_way(made, tmp_path, monkeypatch):
    """By the formula, the predictor, its features for a selection, the server, the program, its loader, and MLflow."""
    padded, flips = {"data.resize": "pad"}, {"data.resize": "pad", "eval.flips": "true"}
    plain, predictor = (Predictor.from_run(made / RUN, changes) for changes in (padded, flips))
    paths, run = image_files(tmp_path), plain.run
    reader = ImageReader.from_config(run.config.data)
    contents = [Path(path).read_bytes() for path in paths]
    pixels = np.stack([reader.encoded(content)[0] for content in contents])
    assert (pixels[1, 0] == [round(255 * value) for value in run.preprocess.mean]).all()
    logits = [
        np.asarray(apply_model(replace(run, mesh=None), run.weights(), {"image": one})[0].logits)
        for one in (pixels, pixels[:, :, ::-1])
    ]
    expected = run.scores((logits[0] + logits[1]) / 2)
    assert np.abs(run.scores(logits[0]) - expected).max() > 1e-3
    export.export_run(RunFolder(made / RUN), str(tmp_path / "out"), "stablehlo", [*flips.items()], template="mlflow")
    model = model_of(tmp_path / "out")
    with client_of(Service(Labeler(predictor))) as send:
        [answer] = send({"url": "/predict", "files": [("images", ("a", content)) for content in contents]})
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda scores, **_: scores))
    ways = {
        "predictor": scores_by(predictor, paths),
        "embedding": np.concatenate([scores for _, scores, _ in predictor.embed(paths, batch_size=4)]),
        "server": [[*result["scores"].values()] for result in answer.json()["results"]],
        "program": model(pixels),
        "loader": model(np.stack([model.read(path) for path in paths])),
        "MLflow": LabelTable(str(tmp_path / "out")).predict(ImageTable(image=contents)),
    }
    for name, scores in ways.items():
        np.testing.assert_allclose(scores, expected, atol=2e-5, err_msg=name)


@pytest.mark.budget(40)
@pytest.mark.parametrize(("kind", "most"), [("onnx_float16", 1e-3), ("onnx_int8", 1e-2)])
def test_pad_and_flips_are_in_programs_of_fewer_bits(kind, most, made, tmp_path):
    pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    flips = {"data.resize": "pad", "eval.flips": "true"}
    paths = image_files(tmp_path)
    for number, image in enumerate(noise(8)):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    options = {"images": [str(tmp_path)]} if kind == "onnx_int8" else {}
    export.export_run(RunFolder(made / RUN), str(tmp_path / "out"), kind, [*flips.items()], **options)
    model, predictor = model_of(tmp_path / "out"), Predictor.from_run(made / RUN, flips)
    pixels = np.stack([model.read(path) for path in paths])
    np.testing.assert_allclose(model(pixels), scores_by(predictor, paths), atol=most)
    np.testing.assert_allclose(model(pixels), model(pixels[:, :, ::-1]), atol=3 * most / 10)


def test_the_loader_labels_files_on_the_command_line(made, tmp_path, capsys):
    label = runpy.run_path(str(made / "out" / "load.py"))["main"]
    [path, *_] = image_files(tmp_path)
    [result] = Predictor.from_run(made / RUN)([path])
    (tmp_path / "damaged.png").write_bytes(b"\x89PNG")
    capsys.readouterr()
    assert label([path, str(tmp_path / "damaged.png")]) == 2
    printed = capsys.readouterr()
    best = sorted(result.labels, key=lambda label: -result.scores[label])
    text = "  ".join(f"{label} {100 * result.scores[label]:.0f} %" for label in best)
    assert printed.out == f"{path}  {text or '(no label reaches its threshold)'}\n"
    assert printed.err.startswith(f"error: cannot read {tmp_path / 'damaged.png'}")
    assert label([]) == 2


@pytest.mark.parametrize("resize", ["square", "crop", "clip", "pad"])
def test_the_loader_resizes_as_in_evaluation(resize, tmp_path):
    config = load_config("linear_probe:dataset=digits")
    config.data.image_size, config.data.resize = 16, resize
    model = object.__new__(standalone.Model)
    model.description = {"preprocess": config.data.to_dict()}
    for height, width in ((40, 23), (19, 64), (16, 16), (2, 1700), (1900, 2)):
        pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "image.png")
        expected = ImageReader.from_config(config.data)(ArrayImages(pixels[None]), 0)
        np.testing.assert_array_equal(model.read(tmp_path / "image.png"), expected, err_msg=f"{height} × {width}")


@pytest.mark.slow
def test_tensors_have_our_parameter_paths(made, tmp_path, monkeypatch):
    folder = RunFolder(made / RUN)
    sizes = {}
    for frozen in ("always", "auto", "never"):
        file = tmp_path / f"{frozen}.safetensors"
        outcome = export.export_run(folder, str(file), "safetensors", include_frozen=frozen)
        sizes[frozen] = set(load_file(file))
    run = Predictor.from_run(made / RUN).run
    assert sizes["always"] == {*run.values, *run.frozen}
    assert sizes["auto"] == sizes["never"] == set(run.values), "the backbone is published"
    assert f"; {len(run.values)} tensors, " in outcome.text()
    with safe_open(tmp_path / "always.safetensors", "np") as opened:
        described = json.loads(opened.metadata()["description"])
    assert described["labels"] == list(CLASSES)
    assert described["calibrated_on"] is None, "there is no program that corrects scores"

    monkeypatch.chdir(made)
    (tmp_path / "always.safetensors").rename(made / "model.safetensors")
    names: dict = {}
    exec(next(program for program in PROGRAMS if "from flax" in program), names)
    pixels = noise(2)
    mean, std = (np.array(described["preprocess"][name]) for name in ("mean", "std"))
    logits = names["model"](jax.numpy.asarray((pixels / 255 - mean) / std, np.float32)).logits
    scores = read_thresholds(folder).correction("abc")(np.asarray(logits))
    np.testing.assert_allclose(scores, model_of(made / "out")(pixels), atol=1e-6)


# ---------------------------------------------------------------------------------------------------------- adapters
@pytest.mark.slow
def test_a_merged_program_gives_the_scores_of_the_run(folders, tmp_path, capsys):
    export.export_run(folders["linear"], str(tmp_path / "out"), "stablehlo", merge=True)
    scores = model_of(tmp_path / "out")(noise(3))
    expected = scores_by(Predictor.from_run(folders["linear"].path), noise(3))
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-6)
    assert np.ptp(scores, axis=0).max() > 1e-4, "the scores depend on the image"
    described = json.loads((tmp_path / "out" / "model.json").read_text())["model"]
    assert (described["adapters"], described["backbone"]["weights"]) == ({}, "none")
    assert "adapters merged, largest difference of probability " in capsys.readouterr().err


@pytest.mark.slow
def test_merged_tensors_have_the_backbone_and_no_adapter(folders, tmp_path):
    sets = {}
    for name, merge in (("merged", True), ("unmerged", False)):
        file = tmp_path / f"{name}.safetensors"
        export.export_run(folders["lora"], str(file), "safetensors", include_frozen="auto", merge=merge)
        sets[name] = set(load_file(file))
    assert "adapters/lora/query/a" in sets["unmerged"] - sets["merged"]
    assert "backbone/blocks/0/attn/qkv/kernel" in sets["merged"] - sets["unmerged"]


def test_a_lora_becomes_a_folder_of_peft(folders, tmp_path):
    outcome = export.export_run(folders["lora"], str(tmp_path / "out"), "peft")
    assert "; 6 tensors, with its classifier; " in outcome.text()
    adapter, values = read_peft(tmp_path / "out"), Predictor.from_run(folders["lora"].path).run.values
    assert dict(adapter.settings) == {"rank": 2, "alpha": 8.0, "targets": ("query", "value"), "rank_stabilized": False}
    for name, tensor in adapter.tensors.items():
        np.testing.assert_array_equal(tensor, values[f"adapters/lora/{name}"], err_msg=name)
    np.testing.assert_array_equal(adapter.classifier["bias"], values["head/classifier/bias"])
    targets = json.loads((tmp_path / "out" / CONFIG).read_text())["target_modules"]
    assert targets == ["attention.q_proj", "attention.v_proj"]


# ---------------------------------------------------------------------------------------------------- as documented
@pytest.mark.slow
def test_the_documented_programs_run_in_an_exported_folder(made, monkeypatch):
    by_loader, of_jax, *_ = PROGRAMS
    monkeypatch.chdir(made / "out")
    *labels, shape = run_python(f"{_APART}sys.path.insert(0, '')\n{by_loader}{of_jax}").splitlines()
    assert (len(labels), shape) == (3, "(2, 3)")


# ----------------------------------------------------------------------------------------------------- every method
METHODS = {path.stem for path in (REPOSITORY / "configs").glob("*.py")} - {"pretrain_digits"}


@pytest.mark.variants(method=("drmoe_resnet101", "mlvpt_digits"))
@pytest.mark.parametrize(
    ("method", "changes"),
    [
        *((method, ON_RESNET if "resnet" in method or "20k" in method else ON_VIT) for method in sorted(METHODS)),
        *(("linear_probe", changes) for changes in CNNS.values()),
    ],
)
def test_every_method_and_family_takes_any_number_of_images(method, changes, small_backbones):
    run = random_run(method, abstract_parts, **changes)
    returned = jax.eval_shape(program_of(run), {**run.values, **run.frozen}, image_shape(run))
    assert str(returned[PROBABILITY].shape) == "(B, 6)"


# -------------------------------------------------------------------------------------------------------------- ONNX
@pytest.fixture
def runtime():
    pytest.importorskip("jax2onnx", reason="the extra onnx is not installed")
    return pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")


@pytest.mark.budget(30)  # the compiler of the export
@pytest.mark.variants("reference")
@pytest.mark.parametrize(
    ("reference", "changes"),
    [
        ("mlvpt_digits", ON_VIT),
        ("drmoe_resnet101", ON_RESNET),
        pytest.param("linear_probe", ON_VIT | {"eval.flips": True}, marks=pytest.mark.slow),
        pytest.param("linear_probe", CNNS["efficientnet_lite0"], marks=pytest.mark.slow),
    ],
)
def test_onnx_runtime_gives_the_same_probabilities(reference, changes, runtime, small_backbones, drawn_parts, tmp_path):
    run = random_run(reference, drawn_parts if changes is ON_VIT else assemble, **changes)
    TARGETS["onnx"].write(Export(run, tmp_path, {}, ALWAYS))
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    [given], [returned] = session.get_inputs(), session.get_outputs()
    assert (given.name, given.type, given.shape) == ("image", "tensor(uint8)", ["B", 32, 32, 3])
    assert (returned.name, returned.shape) == ("probability", ["B", 6])

    def label(images):
        apart = [session.run(None, {"image": images[rows]})[0] for rows in (slice(0, 1), slice(1, None))]
        together = session.run(None, {"image": images})[0]
        np.testing.assert_allclose(np.concatenate(apart), together, atol=1e-5)
        return {PROBABILITY: together}

    assert float(require_equal(run, label).split()[-1]) < 1e-4
    count = operations(tmp_path)
    if reference == "mlvpt_digits":  # two blocks, the last without queries of patches
        assert count >= Counter(Gelu=2, LayerNormalization=5, Softmax=2)
        assert count["MatMul"] > 2 * count["Einsum"], "linear layers are matmuls"
    elif reference != "linear_probe" or "eval.flips" not in changes:
        assert count["Sqrt"] < count["Conv"], "batch norms are in the convolutions"
        assert count["Relu"] + count["Clip"] > count["Conv"] / 2, "activations can be joined with them"


def test_a_run_is_exported_to_onnx(made, runtime):
    outcome = export.export_run(RunFolder(made / RUN), str(made / "onnx"), "onnx", template="space")
    assert (made / "onnx" / "app.py").exists()
    assert (made / "onnx" / "requirements.txt").read_text() == "onnxruntime>=1.17\nnumpy\npillow\n"
    assert "raw weights of step 20 as onnx; " in outcome.text()
    np.testing.assert_allclose(model_of(made / "onnx")(noise(3)), model_of(made / "out")(noise(3)), atol=1e-6)
