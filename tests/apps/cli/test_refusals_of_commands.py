"""Commands that are refused in one sentence, and write nothing."""

import contextlib

import pytest
from helpers.refusals import Refusal, each, run_command
from helpers.scored_run import drawn_split, write_run

# What follows `mlmoe`, in a folder with a run, and what the error says of it.
COMMANDS = {
    # ------------------------------------------------------------------------------------------------------ the mode
    "--mode=trian": "invalid choice: 'trian'",
    "trian": "see mlmoe --help",
    "eval --mode=predict": "--images; see mlmoe predict --help",
    "--json eval": "unrecognized arguments: eval",
    "--mode": "unrecognized arguments: --mode",
    "--help=optm": "config section or key 'optm' does not exist; did you mean 'optim'?",
    "--help=learning_rate": "does not exist; did you mean 'optim.learning_rate'?",
    "--help=zzz": "does not exist; there are seed, init_from, trainable, data, ",
    # ----------------------------------------------------------------------------------------------------- the flags
    "eval --workdir=run --wrkdir=run": "unrecognized arguments: --wrkdir",
    "eval --wrkdir=run": "did you mean 'workdir'; see mlmoe eval --help",
    "eval --workdir=run --workdir=file": "--workdir is given 2 times; give it once",
    "eval --workdir=run --config=mlvpt_digits": "unrecognized arguments: --config=mlvpt_digits",
    "compare --workdir=run --workdir=run --config.seed=1": "unrecognized arguments: --config.seed=1",
    "train --learning_rate=1": "unrecognized arguments: --learning_rate=1",
    "--config=mlvpt_digits --config.seed=1 --config.seed=2": "--config.seed is given 2 times",
    "--config=mlvpt_digits --config.train.epochs": "--config.train.epochs has no value; write --config.train.epochs=",
    "--config=mlvpt_digits --init-from=a --config.init_from=b": "--config.init_from is given twice",
    "data --config=mlvpt_digits --sample=-1": "--sample: '-1' is not a number above 0",
    "reproduce --table=mlvpt.1 --seeds=0,x": "'0,x' is not a list of integers",
    "predict --workdir=run --images=file --select=random --count=3": "invalid choice: 'random'",
    **{mode: "required: --workdir" for mode in ("eval", "thresholds", "report", "export")},
    "predict --workdir=run --images=file --every=0": "'0' is not a number of seconds above 0, such as 5 or 0.5",
    "predict --workdir=run --images=file --every=1s": "'1s' is not a number of seconds above 0, such as 5 or 0.5",
    "predict --workdir=run": "required: --images",
    "predict --workdir=run --images=@names.txt --output=names.txt": "names.txt would replace the file of --images",
    "predict --workdir=run --images empty file --output=./file": "--output=./file would replace the file of --images",
    "predict --workdir=run --images=file --rename=file --output=file": "--output=file would replace the file of --",
    "report --workdir=run --output=names.txt": "--output=names.txt should be an .html file",
    "--config=own_csv:root=empty --workdir=mine": "mine has a labels.txt, which is of no run",
    "data": "required: --config",
    "pack --config=mlvpt_digits": "required: --output",
    "reproduce": "required: --table",
    # ------------------------------------------------------------------------------------------------- flags together
    "": "mlmoe train needs --config=FILE",
    "compare --workdir=run": "needs --workdir=FOLDER twice",
    "data --config=mlvpt_digits --audit --sample=5": "--audit takes all images",
    "data --config=mlvpt_digits --output=new": "writes files only with --audit",
    "predict --workdir=run --images=file --select=both": "--select and --count belong together",
    "predict --workdir=run --images=file --count=3": "--select and --count belong together",
    "predict --workdir=run --images=file --per-video --select=both --count=3": "--per-video writes one table",
    "predict --workdir=run --images=file --per-video --gates": "--per-video writes one table of scores",
    "predict --workdir=run --images=file --per-video --output=new/": "--per-video writes one table",
    "predict --images=file": "needs --workdir=FOLDER, a trained model, or --names=FILE, the names of labels; give one",
    "predict --workdir=run --names=names.txt --images=file": "or --names=FILE, the names of labels; give one",
    "predict --workdir=run --backbone=clip_vitb16 --images=file": "--backbone is for --names",
    "predict --names=names.txt --images=file --checkpoint=latest": "names have no checkpoints",
    "predict --names=names.txt --images=file": "is a list of names, so the backbone is not known",
    "predict --names=v.safetensors --images=file": "cannot read v.safetensors: No such file",
    "predict --names=names.txt --backbone=clip_vitb16 --images=file --config.seed=1": "--config.seed has no effect",
    "encode --names=names.txt --backbone=clip_vitb16": "required: --output",
    "encode --names=names.txt --backbone=clip_vitb16 --output=a.npz": "--output=a.npz should be a .safetensors file in",
    "encode --names=names.txt --backbone=clip_vitb16 --output=no/a.safetensors": "in a folder that exists",
    "encode --names=file --backbone=clip_vitb16 --output=a.safetensors": "file contains no class names",
    "encode --names=names.txt --backbone=dinov2_vitb14 --output=a.safetensors": "was trained without texts",
    "encode --names=names.txt --backbone=clip --output=a.safetensors": "there is no backbone 'clip'",
    "encode --names=names.txt --backbone=clip_vitb16 --output=a.safetensors --template=a": "the template 'a' has no {}",
    "encode --names=names.txt --backbone=clip_vitb16 --output=a.safetensors --config.seed=1": "effect in mlmoe encode",
    "predict --workdir=run --images=file --format=xls": "no --format=xls for this mode; there are label_studio",
    "pack --config=mlvpt_digits --output=a.xml --format=cvat --config.pack.short_side=9": "--config.pack.short_side is",
    "summary": "needs either --config=FILE or --configs",
    "summary --config=mlvpt_digits --configs=linear_probe": "needs either --config=FILE or --configs",
    "prune --config=mlvpt_digits --workdir=new": "prunes the prompts of E2VPT, not group prompts; start from",
    "import --config=mlvpt_digits --workdir=new": "needs --config.init_from",
    "export --workdir=run --output=a.npz": "run is not the run folder of a training: it has no thresholds.json",
    "export --workdir=run --output=a": "needs --format; there are stablehlo, onnx",
    "export --workdir=run --output=a.npz --include-frozen=auto": "--format=official does not take --include-frozen",
    "export --workdir=run --output=a.pth": "is written to .safetensors and .npz files",
    # --------------------------------------------------------------------------------------------- folders and configs
    "eval --workdir=empty": "is not the run folder of a training: it has no config.json",
    "eval --workdir=nothing": "no run folder",
    "report --workdir=demo:photographs": "is for mlmoe predict, serve and export",
    **{f"{mode} --workdir=hf:user/name": "--local-dir=FOLDER" for mode in ("eval", "report", "thresholds")},
    "compare --workdir=hf:user/name --workdir=run": "--local-dir=FOLDER",
    "predict --workdir=demo:birds --images=file": "there is demo:photographs",
    "predict --workdir=run --images=demo:birds": "there are no images demo:birds: demo:photographs are",
    "--config=mlvpt_digits --workdir=file/run": "cannot make the run folder",
    "--config=mlvpt_digit --workdir=new": "did you mean 'mlvpt_digits'",
    "--config=mlvpt_digits --workdir=new --config.optim.learing_rate=1": "learning_rate",
    "--config=mlvpt_digits --workdir=new --config.train.epochs=many": "an integer above 0",
    "--config=mlvpt_digits --workdir=new --config.mesh.fsdp=3": "mesh",
    "--config=mlvpt_dinov2:datset=voc2012 --workdir=new": "did you mean 'dataset'",
    "data --config=mlvpt_digits --config.data.train_split=trian": "trian",
    "data --config=own_csv:fit=sgd": "'fit' is 'sgd' and must be one of logistic, steps",
    # ----------------------------------------------------------------------------------------------- several trainings
    "--config=mlvpt_digits --workdir=new --sweep=config.seed": "--sweep=config.seed is not KEY=VALUE,VALUE,…",
    "--config=mlvpt_digits --workdir=new --sweep=seed=1,2 --config.seed=3": "seed is set by --sweep and by --config.s",
    "--config=mlvpt_digits --sweep=config.seed=1,2 --profile=1:2": "leave it out of a --sweep",
    "--config=mlvpt_digits --workdir=new --sweep=config=vpt,gvpt": "needs --workdir=FOLDER, and no --config",
    "--sweep=config=vpt,gvpt": "--sweep=config=NAME,NAME,… needs --workdir=FOLDER, and no --config",
    "reproduce --table=mlvpt.4 --dataset=digits --workdir=new --config.train.patience=-1": "the run finetune,dataset=",
}


@contextlib.contextmanager
def inside(at):
    """Be in a folder with a file and a run, without a folder of data sets."""
    (at / "file").touch()
    (at / "names.txt").write_text("sea\n")
    (at / "empty").mkdir()
    (at / "mine").mkdir()
    (at / "mine/labels.txt").write_text("sea\n")
    (write_run(at / "run", drawn_split()) / "checkpoints").mkdir()
    with contextlib.chdir(at), pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLMOE_DATA", raising=False)
        yield


def of_command(command, *says):
    return Refusal(command or "nothing", inside, lambda at: run_command(*command.split()), *says)


LITERAL = of_command(
    "--config=mlvpt_dinov2",
    "no folder data/coco2014",
    "needs annotations, train2014 and val2014",
    "https://cocodataset.org",
    "docs/datasets.md#coco-2014",
)


@each([LITERAL, *(of_command(command, said) for command, said in COMMANDS.items())])
def test_refusals(case, tmp_path):
    case.check(tmp_path)
