"""What an export refuses; nothing is written."""

import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.drawn_images import noise
from helpers.exported import ON_VIT, random_run
from helpers.refusals import Refusal
from PIL import Image

from mlmoe_jax.apps.export import program, quantize
from mlmoe_jax.apps.export.run import export_run
from mlmoe_jax.apps.export.targets import ALWAYS, TARGETS, Export


def drawn(folder: Path):
    """A program of random probabilities."""
    return lambda images: {"probability": np.random.default_rng(0).random((len(images), 3), np.float32)}


INTEGERS = replace(quantize.INT8, write=lambda job: "", load=drawn, place=Path)
NARROW = replace(program.STABLEHLO, needs={"eval.dtype": "float32"})


def patching(place, name: str, value, images: int = 0):
    """Write some images and one that is none, and replace an attribute during the call."""

    @contextmanager
    def make(at):
        (at / "none.png").write_bytes(b"\x89PNG")
        for n, image in enumerate(noise(images)):
            Image.fromarray(image).save(at / f"{n}.png")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(place, name, value)
            yield at

    return make


def refused(name: str, *says: str, run="plain", make=None, kind="stablehlo", output="{at}/out", **options):
    """An export of one of the folders; options: of `export_run`, with `{at}` for the folder of the case."""

    def of(folders) -> Refusal:
        def call(at):
            given = {
                key: [one.format(at=at) for one in value] if key == "images" else value
                for key, value in options.items()
            }
            export_run(folders[run], output.format(at=at), kind, **given)

        return Refusal(name, make, call, *says)

    return pytest.param(of, id=name)


REFUSALS = [
    refused(
        "a dtype that the format lacks",
        "--format=stablehlo needs eval.dtype=float32, not bfloat16; leave --config.eval.dtype out",
        make=patching(program, "STABLEHLO", NARROW),
        overrides=[("eval.dtype", "bfloat16")],
    ),
    refused("an output that exists", "{at} already exists; remove it or set another --output", output="{at}"),
    refused("no folder of the output", "there is no local folder", output="{at}/no/out"),
    refused("a bucket", "no local folder", output="gs://bucket/out"),
    refused(
        "a template of tensors",
        "--format=safetensors does not take --template here; leave it out",
        kind="safetensors",
        template="space",
    ),
    refused(
        "a program that differs",
        "probability of the program differs from the run by nan",
        make=patching(program, "outputs_of", lambda *given: {"probability": np.nan}),
    ),
    # outputs
    refused(
        "an unknown output",
        "--outputs=probability,saliency should be probability, or more names of probability,features,map, each once",
        outputs="probability,saliency",
    ),
    refused("no probability", "--outputs=map should be", outputs="map"),
    refused("an output twice", "--outputs=probability,map,map should be", outputs="probability,map,map"),
    refused(
        "outputs of tensors",
        "--format=safetensors does not take --outputs here; leave it out",
        kind="safetensors",
        outputs="probability,features",
    ),
    # adapters
    refused("no adapters to merge", "the run has no adapters to merge; leave --merge out", merge=True),
    refused("nonlinear adapters", "the adapter adaptformer is not linear", run="bottleneck", merge=True),
    refused("PEFT and a merge", "--format=peft does not take --merge here; leave it out", kind="peft", merge=True),
    refused("PEFT of others", "PEFT's files hold one LoRA or DoRA and no prompts", run="linear", kind="peft"),
    # calibration
    refused(
        "images without a calibration",
        "--format=onnx does not take --images and --calibration-images here; leave it out",
        kind="onnx",
        count=5,
    ),
    refused("no data set", "/absent", run="no data", kind="onnx_int8", make=patching(quantize, "INT8", INTEGERS)),
    refused(
        "few readable images",
        "has 4 readable images and needs at least 5",
        kind="onnx_int8",
        make=patching(quantize, "INT8", INTEGERS, images=4),
        images=["{at}"],
    ),
    refused(
        "integers with other scores",
        "and 0.99 is the least, so it was not written",
        kind="onnx_int8",
        make=patching(quantize, "INT8", INTEGERS, images=20),
        images=["{at}"],
    ),
]


@pytest.mark.parametrize("case", REFUSALS)
def test_nothing_is_exported(case, folders, tmp_path):
    case(folders).check(tmp_path)


@pytest.mark.slow
def test_a_model_that_cannot_be_converted_is_named(small_backbones, tmp_path, refusal, monkeypatch):
    def fails(*arguments, **options):
        raise NotImplementedError("no rem. And more")

    monkeypatch.setitem(sys.modules, "jax2onnx", SimpleNamespace(to_onnx=fails))
    run = random_run("cnn_rnn_resnet101", **ON_VIT)
    sentence = refusal(TARGETS["onnx"].write, Export(run, tmp_path, {}, ALWAYS))
    assert sentence.startswith("jax2onnx cannot convert the head cnn_rnn on vit_digits (no rem); export it with")
