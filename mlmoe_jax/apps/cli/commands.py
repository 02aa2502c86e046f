"""The commands of the command line: each has its sentence, its flags and its function.

Results go to stdout, messages to stderr. Modules are imported where they are used, so that --help and a mistake in a
command are answered at once.
"""

from __future__ import annotations

import logging
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mlmoe_jax.apps.cli.program_cache import cache_programs
from mlmoe_jax.apps.export.targets import TARGETS
from mlmoe_jax.apps.tools.part_options import PART_FORMATS, PART_SIZE, PartOptions, wants_parts
from mlmoe_jax.data.sources.labeling_formats import FORMATS
from mlmoe_jax.errors import UserError, success
from mlmoe_jax.runtime.files import is_read_only
from mlmoe_jax.runtime.keys import KeyValues
from mlmoe_jax.runtime.stages import STAGES
from mlmoe_jax.runtime.table import Outcome, Table

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from mlmoe_jax.evaluation.results import Results
    from mlmoe_jax.inference.predictor import Predictor
    from mlmoe_jax.runs.folder import RunFolder

RunCommand = Callable[[Namespace, KeyValues], Outcome]

_RUN = tuple(set(STAGES) - {"pack", "prune", "encode"})  # the stages of a training, whose config later commands read
_MOST_VALUES = 12  # of an attribute whose confusions mlmoe eval prints


@dataclass(frozen=True)
class Command:
    """One command of the program, such as `mlmoe train`.

    Attributes:
      run: the function that runs the command and returns its output.
      sentence: the help text of the command.
      example: the arguments of the example in the help text.
      needs: the names of the required flags, keys of `flags.FLAGS`.
      flags: the names of the optional flags, keys of `flags.FLAGS`.
      stages: the stages that the command runs, names in `runtime.stages.STAGES`. A given config key that no stage reads
        causes a warning. () means that the command accepts no `--config.KEY=VALUE`.
      together: whether all processes of a multi-process job run the command. If False, only the first process runs it.
      independent: function that returns whether, with these flags, each process of a job runs the command for itself.
      output: the help text of the flag --output.
      options: name of a flag -> arguments of `add_argument` that replace the arguments in `flags.FLAGS`.
    """

    run: RunCommand
    sentence: str
    example: str
    needs: Sequence[str] = ()
    flags: Sequence[str] = ()
    stages: Sequence[str] = _RUN
    together: bool = False
    independent: Callable[[Namespace], bool] = lambda flags: False
    output: str = ""
    options: Mapping[str, dict[str, Any]] = field(default_factory=dict)


COMMANDS: dict[str, Command] = {}


def _command(name: str, sentence: str, example: str, **settings) -> Callable[[RunCommand], RunCommand]:
    """Return a decorator that registers a function as the command `name` in COMMANDS.

    The remaining arguments are attributes of `Command`.
    """

    def add(run: RunCommand) -> RunCommand:
        COMMANDS[name] = Command(run, sentence, example, **settings)
        return run

    return add


# ------------------------------------------------------------------------------------------------- configs and folders
def _load_config(reference: str, overrides: KeyValues, mode: str) -> ConfigDict:
    import mlmoe_jax.config as configuration

    config = configuration.load_config(reference, overrides)
    configuration.validate(config)
    _warn_of_unused(config, overrides, mode)
    return config


def _warn_of_unused(config: ConfigDict, overrides: KeyValues, mode: str) -> None:
    """Log a warning about each key of the command line that has no effect in the config, or in `mode`."""
    import mlmoe_jax.config as configuration

    for message in configuration.find_unused(config, overrides):
        logging.getLogger(__name__).warning(message)
    _warn_of_unread(overrides, mode, trained=False)


def _warn_of_unread(overrides: KeyValues, mode: str, *, trained: bool = True) -> None:
    """Log a warning about each key of the command line that no stage of `mode` reads.

    `trained` is whether the command uses a trained model. If so, a key that cannot be set for a trained model raises
    UserError.
    """
    import mlmoe_jax.config as configuration

    if trained:
        configuration.require_changeable(overrides)
    for key in configuration.find_unread(overrides, COMMANDS[mode].stages):
        logging.getLogger(__name__).warning(f"{key} has no effect in mlmoe {mode}")


def _open_folder(location: str) -> RunFolder:
    """Return the run folder at `location`, for commands that may write to it.

    Raises UserError if `location` names a model on the Hugging Face hub or in this package, which are read-only.
    """
    from mlmoe_jax.runs.folder import RunFolder

    if is_read_only(location):
        raise UserError(
            f"--workdir={location} is for mlmoe predict, serve and export; for other modes, download the model with "
            "`hf download USER/NAME --local-dir=FOLDER` and set --workdir=FOLDER"
        )
    return RunFolder(location)


def _open_model(location: str) -> RunFolder:
    """Return the folder of a run, or of a model on the hub or in this package, for commands that only read it.

    Also enable the cache of compiled programs, see `cache_programs`.
    """
    from mlmoe_jax.runs.shared_model import run_folder

    folder = run_folder(location)
    cache_programs()
    return folder


def _start_run(flags: Namespace, overrides: KeyValues, sweep: Sequence[str] = ()) -> tuple[ConfigDict, RunFolder]:
    """Return the config and the folder of a training that starts or resumes.

    Without --workdir, the name of the folder is made from the config, the overrides, the mode and `sweep`, the values
    of the flag --sweep.
    """
    import mlmoe_jax.config as configuration
    from mlmoe_jax.runs.folder import stored_config
    from mlmoe_jax.runs.naming import default_folder
    from mlmoe_jax.runtime.progress import status

    if not flags.config:
        raise UserError(f"mlmoe {flags.mode} needs --config=FILE, such as --config=configs/mlvpt_digits.py")

    location = flags.workdir or default_folder(flags.config, overrides, mode=flags.mode, sweep=sweep)

    def read_resumed() -> ConfigDict | None:
        if sweep:  # each run has its own folder
            return None
        folder = _open_folder(location)
        folder.require_creatable()
        return stored_config(folder)

    config = configuration.load_config(flags.config, overrides, run=read_resumed)
    if not sweep:  # without the swept values it may be invalid
        _warn_of_unused(config, overrides, flags.mode)
    if not flags.workdir:
        status(f"run folder: {location}")
    cache_programs()
    return config, _open_folder(location)


# --------------------------------------------------------------------------------------------------------------- train
@_command(
    "train",
    "train a model, or resume its training, and evaluate it (the default)",
    "--config=mlvpt_digits --workdir=runs/digits --config.optim.learning_rate=3e-4",
    flags=("config", "workdir", "verbose", "sweep", "profile", "init-from"),
    together=True,
)
def _train(flags: Namespace, overrides: KeyValues) -> Outcome:
    if flags.sweep:
        return _sweep(flags, overrides)
    config, folder = _start_run(flags, overrides)
    from mlmoe_jax.training.loop import train
    from mlmoe_jax.training.profiling import Window

    window = Window.parse(flags.profile) if flags.profile else None
    return _finish_training(train(config, folder, profile=window), config, folder, flags)


@_command(
    "prune",
    "train, prune the prompts, and train again (E2VPT)",
    "--config=e2vpt --workdir=runs/pruned",
    flags=("config", "workdir", "verbose", "init-from"),
    together=True,
    stages=(*_RUN, "prune"),
)
def _prune(flags: Namespace, overrides: KeyValues) -> Outcome:
    config, folder = _start_run(flags, overrides)
    from mlmoe_jax.apps.tools.prune import prune

    return _finish_training(prune(config, folder), config, folder, flags)


def _finish_training(results: Results, config: ConfigDict, folder: RunFolder, flags: Namespace) -> Outcome:
    """Write the requested sample images of a finished training, and return its results to print."""
    from mlmoe_jax.inference.explain import write_requested_samples

    write_requested_samples(folder, config)
    if config.eval.select_on == "test":
        print("selected on test, as published", file=sys.stderr)
    workdir = f"--workdir={shlex.quote(str(folder))}"
    following = f"next: mlmoe report {workdir}, or mlmoe predict {workdir} --images=FOLDER"
    return _show_results(results, flags, f"run folder: {folder}\n{following}")


def _show_results(results: Results, flags: Namespace, *further: Table | str) -> Outcome:
    from mlmoe_jax.evaluation.measure import results_table

    return Outcome([results_table(results, every=flags.verbose), *further])


def _sweep(flags: Namespace, overrides: KeyValues) -> Outcome:
    import mlmoe_jax.config as configuration
    from mlmoe_jax.apps.papers.grid import METHOD, GridPoint, combine_axes, method_points, parse_sweep
    from mlmoe_jax.apps.papers.sweep import sweep

    if flags.profile:
        raise UserError("--profile traces one training; leave it out of a --sweep")
    axes = parse_sweep(flags.sweep, configuration.default_config())
    if both := axes.keys() & {key for key, _ in overrides}:
        raise UserError(f"{min(both)} is set by --sweep and by --config.{min(both)}; leave one out")
    methods = axes.pop(METHOD, None)
    if methods is None:  # the config without the swept values may be invalid
        config, folder = _start_run(flags, overrides, flags.sweep)
        bases = [GridPoint("", {}, config)]
    elif flags.config or not flags.workdir:
        raise UserError("--sweep=config=NAME,NAME,… needs --workdir=FOLDER, and no --config")
    else:
        bases, folder = method_points(methods, overrides), _open_folder(flags.workdir)
        cache_programs()
    points = combine_axes(bases, axes)
    for given in (*dict.fromkeys(axes, "").items(), *overrides):
        if all(unused := [configuration.find_unused(point.config, [given]) for point in points]):
            logging.getLogger(__name__).warning(*unused[0])
    return sweep(points, folder)


@_command(
    "reproduce",
    "train the rows of a published table and print them beside its numbers",
    "--table=mlvpt.1 --dataset=digits --dry-run",
    needs=("table",),
    flags=("workdir", "only", "dataset", "root", "seeds", "dry-run"),
    together=True,
)
def _reproduce(flags: Namespace, overrides: KeyValues) -> Outcome:
    from mlmoe_jax.apps.papers.request import WORKDIR, dry_run, parse_request

    request = parse_request(
        flags.table,
        only=flags.only,
        dataset=flags.dataset,
        root=flags.root,
        seeds=flags.seeds,
        overrides=overrides,
    )
    workdir = flags.workdir or WORKDIR
    if flags.dry_run:
        return Outcome([dry_run(request, workdir)])
    from mlmoe_jax.apps.papers.reproduce import reproduce

    cache_programs()
    return reproduce(request, _open_folder(workdir))


@_command(
    "import",
    "make a run folder of a checkpoint of the authors' code, or of the vectors of label names",
    "--config=mlvpt_digits --init-from=checkpoint.pth --workdir=runs/published",
    flags=("config", "workdir", "init-from"),
)
def _import(flags: Namespace, overrides: KeyValues) -> Outcome:
    config, folder = _start_run(flags, overrides)
    from mlmoe_jax.training.import_run import import_run

    import_run(config, folder)
    return Outcome([f"run folder: {folder}"])


# ------------------------------------------------------------------------------------------------------ look at a model
@_command(
    "eval",
    "evaluate a trained model again; its results replace earlier ones",
    "--workdir=runs/digits --config.data.test_splits=val",
    needs=("workdir",),
    flags=("verbose", "checkpoint"),
    together=True,
    stages=("data", "image", "score", "measure", "report"),
)
def _eval(flags: Namespace, overrides: KeyValues) -> Outcome:
    folder = _open_folder(flags.workdir)
    cache_programs()
    _warn_of_unread(overrides, "eval")
    from mlmoe_jax.evaluation.evaluate import evaluate_opened
    from mlmoe_jax.evaluation.measure import confusion_tables
    from mlmoe_jax.runs.restore import open_run

    run = open_run(folder, overrides, which=flags.checkpoint, own=True)
    results = evaluate_opened(folder, run)
    tables = [table for table in confusion_tables(folder, results) if len(table.rows) <= _MOST_VALUES]
    outcome = _show_results(results, flags, *tables)
    return replace(outcome, exit_code=success(run.outdated))


@_command(
    "thresholds",
    "fit the thresholds of a trained model to the scores of a split",
    "--workdir=runs/digits --config.thresholds.per=global",
    needs=("workdir",),
    stages=("fit",),
)
def _thresholds(flags: Namespace, overrides: KeyValues) -> Outcome:
    from mlmoe_jax.apps.tools.fit_thresholds import fit_run

    return fit_run(_open_folder(flags.workdir), overrides)


@_command(
    "calibrate",
    "correct the scores of a trained model, fitted to a split, so that they are probabilities",
    "--workdir=runs/digits --config.calibration.method=temperature",
    needs=("workdir",),
    stages=("calibrate",),
)
def _calibrate(flags: Namespace, overrides: KeyValues) -> Outcome:
    from mlmoe_jax.apps.tools.fit_thresholds import calibrate_run

    return calibrate_run(_open_folder(flags.workdir), overrides)


@_command(
    "report",
    "write one HTML page about a run",
    "--workdir=runs/digits",
    needs=("workdir",),
    flags=("against", "cost", "output"),
    stages=(),
    output="an .html file (default: report.html in the run folder)",
)
def _report(flags: Namespace, overrides: KeyValues) -> Outcome:
    from mlmoe_jax.apps.report.page import write_report

    against = _open_folder(flags.against) if flags.against else None
    path = write_report(_open_folder(flags.workdir), against=against, output=flags.output, cost=flags.cost)
    return Outcome([f"report: {path}"])


@_command(
    "compare",
    "compare the results of two runs",
    "--workdir=runs/first --workdir=runs/second",
    needs=("workdir",),
    flags=("split", "output"),
    stages=(),
    output="a .csv file",
    options={"workdir": {"action": "append"}},
)
def _compare(flags: Namespace, overrides: KeyValues) -> Outcome:
    if len(flags.workdir) != 2:
        raise UserError("mlmoe compare needs --workdir=FOLDER twice, once for each run")
    from mlmoe_jax.apps.tools.compare import compare_folders

    first, second = map(_open_folder, flags.workdir)
    return compare_folders(first, second, split=flags.split, output=flags.output)


# --------------------------------------------------------------------------------------------------------- use a model
def _require_format(name: str | None, known: Sequence[str]) -> None:
    if name and name not in known:
        raise UserError(f"there is no --format={name} for this mode; there are {', '.join(known)}")


@_command(
    "predict",
    "label images",
    "--workdir=runs/digits --images=photos --output=labels.csv",
    needs=("images",),
    flags=(
        *("workdir", "names", "backbone"),
        *("output", "format", "checkpoint", "top-k", "gates", "select", "count", "batch-size"),
        *("column", "part-size", "worker", "every", "per-video", "rename", "leave-out"),
    ),
    independent=lambda flags: True,
    output="a .csv or .jsonl file; a folder for parts of many images, which the same command completes; a "
    "file or folder of the --format; or - for stdout (default: predictions.csv, selected.csv with --select, "
    ".jsonl with --gates, or stdout with --json)",
    stages=("image", "model", "score"),
)
def _predict(flags: Namespace, overrides: KeyValues) -> Outcome:
    _require_format(flags.format, (*FORMATS, *PART_FORMATS))
    in_parts = wants_parts(flags.output, flags.format)
    if bool(flags.select) != bool(flags.count):
        raise UserError("--select and --count belong together, as in --select=both --count=100; give both or none")
    if flags.per_video and (flags.select or flags.gates or in_parts):
        raise UserError("--per-video writes one table of scores; give --output=FILE.csv, and no --select or --gates")
    _warn_of_unread(overrides, "predict", trained=bool(flags.workdir))
    if in_parts:
        _require_folder_of_parts(flags)
        options = _part_options(flags, flags.format)
    else:
        _require_one_process(flags)
    open_predictor = _model_to_predict(flags, overrides)
    labeling = {"batch_size": flags.batch_size, "top_k": flags.top_k, "gates": flags.gates}
    if in_parts:
        from mlmoe_jax.apps.tools.label_parts import label_parts

        return label_parts(open_predictor, options, **labeling)
    from mlmoe_jax.apps.tools.predict_files import choose_target, predict_files
    from mlmoe_jax.runs.folder import RunFolder

    target = choose_target(
        flags.output,
        RunFolder("." if flags.names or is_read_only(flags.workdir) else flags.workdir),
        json_lines=flags.json,
        gates=flags.gates,
        form=flags.format,
        select=bool(flags.select),
    )
    return predict_files(
        open_predictor,
        flags.images,
        target,
        select=flags.select,
        count=flags.count,
        column=flags.column,
        every=flags.every,
        per_video=flags.per_video,
        **labeling,
    )


def _require_folder_of_parts(flags: Namespace) -> None:
    if flags.select:
        raise UserError("--select writes one file; give --output=FILE.csv, or leave --output out")
    if not wants_parts(flags.output, None):
        given = f", not {flags.output}" if flags.output else ""
        raise UserError(f"--format={flags.format} is for parts of a corpus; give --output=FOLDER/{given}")


def _require_one_process(flags: Namespace) -> None:
    """Raise UserError if flags are for parts, or the job has other processes: together they write only parts."""
    from mlmoe_jax.runtime import distributed

    if flags.worker or flags.part_size:
        raise UserError("--worker and --part-size are for parts of a corpus; give --output=FOLDER/")
    _, count = distributed.stand_alone()
    if count > 1:
        raise UserError(
            f"the {count} processes of a job cannot write one file; give --output=FOLDER/, into which each writes "
            "parts, or start one process"
        )


def _part_options(flags: Namespace, form: str | None = None) -> PartOptions:
    """Return the options of a folder of parts. JAX gets the devices of this process alone."""
    from mlmoe_jax.runtime import distributed

    alone = distributed.stand_alone()
    return PartOptions(
        flags.images,
        flags.output,
        form or PART_FORMATS[0],
        size=flags.part_size or PART_SIZE,
        worker=flags.worker or alone,
        column=flags.column,
        every=flags.every,
    )


def _trained_model(flags: Namespace, overrides: KeyValues) -> Callable[[], Predictor]:
    """Return a function that opens the model of --workdir; UserError if there is no trained model."""
    folder = _open_model(flags.workdir)
    folder.require_model()
    from mlmoe_jax.inference.predictor import Predictor

    predictor = partial(Predictor.from_run, folder.path, overrides, checkpoint=flags.checkpoint)
    return lambda: predictor().rename(flags.rename, flags.leave_out)


def _model_to_predict(flags: Namespace, overrides: KeyValues) -> Callable[[], Predictor]:
    """Return a function that opens the model of `mlmoe predict`.

    The model is in the run folder --workdir, or is made from the label names in --names. Raises UserError unless
    exactly one of these two flags is given.
    """
    if bool(flags.workdir) == bool(flags.names):
        raise UserError(
            "mlmoe predict needs --workdir=FOLDER, a trained model, or --names=FILE, the names of labels; give one"
        )
    if flags.workdir:
        if flags.backbone:
            raise UserError("--backbone is for --names; a run has a backbone, so leave it out")
        return _trained_model(flags, overrides)
    if flags.checkpoint != "best":
        raise UserError("--checkpoint is for --workdir; names have no checkpoints, so leave it out")
    from mlmoe_jax.inference.by_names import names_origin

    cache_programs()
    ranked = all(key != "eval.threshold" for key, _ in overrides)
    predictor = partial(names_origin(flags.names, flags.backbone or "", overrides).predictor, ranked=ranked)
    return lambda: predictor().rename(flags.rename, flags.leave_out)


@_command(
    "serve",
    "label images over HTTP and on a web page",
    "--workdir=runs/digits --port=8000",
    needs=("workdir",),
    flags=("checkpoint", "host", "port", "rename", "leave-out"),
    stages=("image", "score", "serve"),
)
def _serve(flags: Namespace, overrides: KeyValues) -> Outcome:
    from mlmoe_jax.apps import serving

    serving.require_libraries()
    from mlmoe_jax.apps.serving.server import serve

    open_predictor = _trained_model(flags, overrides)
    _warn_of_unread(overrides, "serve")
    return serve(open_predictor, host=flags.host, port=flags.port)


@_command(
    "export",
    "write a trained model for use without this package",
    "--workdir=runs/digits --format=onnx --output=exported",
    needs=("workdir", "output"),
    flags=("format", "images", "include-frozen", "calibration-images", "merge", "template", "outputs", "checkpoint"),
    output="a .safetensors or .npz file, or a folder with --format",
    stages=("data", "image", "score"),
)
def _export(flags: Namespace, overrides: KeyValues) -> Outcome:
    _require_format(flags.format, TARGETS)
    folder = _open_model(flags.workdir)
    _warn_of_unread(overrides, "export")
    from mlmoe_jax.apps.export.run import export_run

    return export_run(
        folder,
        flags.output,
        flags.format,
        overrides,
        checkpoint=flags.checkpoint,
        include_frozen=flags.include_frozen,
        merge=flags.merge,
        template=flags.template,
        outputs=flags.outputs,
        images=flags.images,
        count=flags.calibration_images,
    )


@_command(
    "push",
    "share a trained model on the Hugging Face hub",
    "--workdir=runs/digits --repo=ada/digits --license=apache-2.0",
    needs=("workdir", "repo"),
    flags=("revision", "private", "license", "output"),
    stages=(),
    output="a folder for the files to inspect them; nothing is uploaded",
)
def _push(flags: Namespace, overrides: KeyValues) -> Outcome:
    from mlmoe_jax.apps.hub.push import push

    return push(
        _open_folder(flags.workdir),
        flags.repo,
        revision=flags.revision,
        private=flags.private,
        license_name=flags.license,
        output=flags.output,
    )


# ------------------------------------------------------------------------------------------------------------- prepare
@_command(
    "encode",
    "encode the names of labels as vectors, by the text tower of a backbone",
    "--names=labels.txt --backbone=siglip2_vitb16_256 --output=labels.safetensors",
    needs=("names", "backbone", "output"),
    flags=("template",),
    output="a .safetensors file",
    options={
        "template": {
            "help": "a text with {} for the name of a label; repeat for several (default: as the backbone has)",
            "action": "append",
            "default": [],
            "choices": None,
        },
    },
    stages=("encode",),
)
def _encode(flags: Namespace, overrides: KeyValues) -> Outcome:
    from mlmoe_jax.inference.text_encoder import encode_file

    cache_programs()
    vectors = encode_file(flags.names, flags.output, flags.backbone, flags.template, overrides)
    return Outcome([f"vectors of {len(vectors.names):,} names written to {flags.output}"])


@_command(
    "data",
    "check the images and labels of a data set",
    "--config=own_csv:root=photos",
    needs=("config",),
    flags=("sample", "audit", "output"),
    output="of --audit: a folder (default: audit)",
)
def _data(flags: Namespace, overrides: KeyValues) -> Outcome:
    if flags.audit and flags.sample:
        raise UserError("--audit takes all images; leave --sample out")
    if flags.output and not flags.audit:
        raise UserError("mlmoe data writes files only with --audit; add it, or leave --output out")
    config = _load_config(flags.config, overrides, flags.mode)
    if flags.audit:
        from mlmoe_jax.apps.audit.suggestions import audit_data

        cache_programs()
        return audit_data(config, flags.output)
    from mlmoe_jax.apps.tools.check import check_data, report_outcome

    return report_outcome(check_data(config, flags.sample))


@_command(
    "pack",
    "write a data set as a few large files, or its labels for a labeling tool",
    "--config=own_csv:root=photos --output=packed",
    needs=("config", "output"),
    flags=("format",),
    output="a folder, an address such as gs://bucket/folder, or a file or folder of the --format with {split}",
    stages=("data", "image", "pack"),
)
def _pack(flags: Namespace, overrides: KeyValues) -> Outcome:
    _require_format(flags.format, FORMATS)
    config = _load_config(flags.config, overrides, flags.mode)
    if not flags.format:
        from mlmoe_jax.apps.tools.pack import pack

        return pack(config, flags.output)
    import mlmoe_jax.config as configuration
    from mlmoe_jax.apps.tools.label_files import write_labels

    # Labels are written as a training reads them.
    for key in configuration.find_unread(overrides, ("data", "image", "train")):
        raise UserError(f"--config.{key} is for shards, not for --format={flags.format}; leave it out")
    return write_labels(config, flags.format, flags.output)


@_command(
    "features",
    "write the features of a backbone",
    "--config=own_csv:root=photos --output=features",
    needs=("config", "output"),
    flags=("images", "column", "part-size", "worker", "every"),
    independent=lambda flags: bool(flags.images),
    output="a folder; of --images, it gets parts, which the same command completes",
    stages=("data", "image", "model", "score"),
)
def _features(flags: Namespace, overrides: KeyValues) -> Outcome:
    config = _load_config(flags.config, overrides, flags.mode)
    cache_programs()
    if flags.images:
        from mlmoe_jax.apps.tools.feature_parts import write_feature_parts

        if not wants_parts(flags.output, None):
            raise UserError(f"features of --images are parts in a folder; give --output=FOLDER/, not {flags.output}")
        return write_feature_parts(config, _part_options(flags))
    if flags.column or flags.part_size or flags.worker or flags.every:
        raise UserError("--column, --part-size, --worker and --every are for the parts of --images; give images")
    from mlmoe_jax.apps.tools.feature_files import write_features

    return write_features(config, flags.output)


@_command(
    "summary",
    "count parameters, multiply-adds and memory; nothing is trained",
    "--configs=mlvpt_digits,linear_probe",
    flags=("config", "configs"),
)
def _summary(flags: Namespace, overrides: KeyValues) -> Outcome:
    if bool(flags.config) == bool(flags.configs):
        raise UserError("mlmoe summary needs either --config=FILE or --configs=FILE,FILE,…")
    import mlmoe_jax.config as configuration
    from mlmoe_jax.apps.tools.preflight.cost import cost_outcome, count_cost

    references = configuration.split_references(flags.configs) if flags.configs else [flags.config]
    costs = {reference: count_cost(_load_config(reference, overrides, flags.mode)) for reference in references}
    return Outcome(cost_outcome(costs).parts, document=costs if flags.configs else costs[flags.config])


@_command(
    "compile",
    "compile the steps for a device or a TPU slice, and tell whether they fit",
    "--config=mlvpt_digits --topology=v5e:4x4",
    needs=("config",),
    flags=("topology", "find-batch", "labels", "quick"),
)
def _compile(flags: Namespace, overrides: KeyValues) -> Outcome:
    config = _load_config(flags.config, overrides, flags.mode)
    from mlmoe_jax.apps.tools.preflight.compile_check import check_outcome, check_steps

    report = check_steps(
        config, flags.topology, find_batch=flags.find_batch, num_labels=flags.labels, quick=flags.quick
    )
    return check_outcome(report)
