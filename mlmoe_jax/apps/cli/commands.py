"""The commands of the command line. Everything about a command is in its entry of COMMANDS.

Results go to stdout, messages to stderr. Modules are imported where they are used, so that --help and a mistake in a
command are answered at once.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mlmoe_jax.apps.cli.program_cache import cache_programs
from mlmoe_jax.apps.export.targets import TARGETS
from mlmoe_jax.data.sources.labeling_formats import FORMATS
from mlmoe_jax.errors import DONE, INTERRUPTED, OUTDATED, UserError
from mlmoe_jax.runtime.files import DEMO, HUB
from mlmoe_jax.runtime.table import Outcome

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from mlmoe_jax.evaluation.results import Results
    from mlmoe_jax.runs.folder import RunFolder

KeyValues = list[tuple[str, str]]
SHARED = (HUB, DEMO)  # the first letters of a --workdir on the hub or in the package
TRAIN, INSPECT, USE, PREPARE = "Train", "Look at a trained model", "Use a trained model", "Prepare"


@dataclass(frozen=True)
class Command:
    """One command of the program, such as `mlmoe train`.

    Attributes:
      purpose: the heading of its line in --help.
      sentence: what it does.
      example: its arguments in an example.
      run: runs it, and returns what to print.
      flags: the names of its flags in `flags.FLAGS`.
      needs: required flag -> what its value is.
      output: the help of its --output.
      folders: the number of run folders that --workdir names.
      reads_shared: its --workdir may also be a model on the hub or in the package.
      config_from: where its config comes from if it has no --config.
      takes_keys: it has --config.KEY=VALUE.
      together: all processes of a job work; otherwise only the first process works.
      check: raises UserError for flags that contradict one another.
    """

    purpose: str
    sentence: str
    example: str
    run: Callable[[Namespace, KeyValues], Outcome]
    flags: tuple[str, ...] = ()
    needs: Mapping[str, str] = field(default_factory=dict)
    output: str = ""
    folders: int = 1
    reads_shared: bool = False
    config_from: str = ""
    takes_keys: bool = True
    together: bool = False
    check: Callable[[Namespace], None] | None = None


# ------------------------------------------------------------------------------------------------- configs and folders
def _load_config(reference: str, overrides: KeyValues) -> ConfigDict:
    import mlmoe_jax.config as configuration

    config = configuration.load_config(reference, overrides)
    configuration.validate(config)
    return config


def is_shared(location: str) -> bool:
    """Return whether a --workdir names a read-only model, on the hub or in the package."""
    return location.startswith(SHARED)


def _open_folder(flags: Namespace) -> RunFolder:
    from mlmoe_jax.runs.shared_model import run_folder

    return run_folder(flags.workdir)


def _start_run(flags: Namespace, overrides: KeyValues) -> tuple[ConfigDict, RunFolder]:
    """Return the config and the folder of a run that starts or resumes.

    Without --workdir, the folder gets a name from the command.
    """
    import mlmoe_jax.config as configuration
    from mlmoe_jax.runs.folder import RunFolder, stored_config
    from mlmoe_jax.runs.naming import RUNS, default_folder, run_name
    from mlmoe_jax.runtime.progress import status

    def read_resumed() -> ConfigDict | None:
        if flags.sweep:  # each run has its own folder
            return None
        name = run_name(flags.config, overrides, mode=flags.mode)  # configs that read the data are for own data
        folder = RunFolder(f"{RUNS}/{name}" if flags.workdir is None else flags.workdir)
        folder.require_creatable()
        return stored_config(folder)

    config = configuration.load_config(flags.config, overrides, run=read_resumed)
    if flags.workdir is None:
        flags.workdir = default_folder(flags.config, overrides, config, mode=flags.mode, sweep=flags.sweep)
        status(f"run folder: {flags.workdir}")
    cache_programs()
    return config, _open_folder(flags)


# --------------------------------------------------------------------------------------------------------------- train
def sweeps_configs(flags: Namespace) -> bool:
    """Return whether a --sweep is over several configs."""
    return any(axis.partition("=")[0].strip().removeprefix("config.") == "config" for axis in flags.sweep)


def _check_train(flags: Namespace) -> None:
    if flags.sweep and flags.profile:
        raise UserError("--profile traces one training; leave it out of a --sweep")


def _train(flags: Namespace, overrides: KeyValues) -> Outcome:
    if flags.sweep:
        return _sweep(flags, overrides)
    config, folder = _start_run(flags, overrides)
    from mlmoe_jax.training.loop import train
    from mlmoe_jax.training.profiling import Window

    window = Window.parse(flags.profile) if flags.profile else None
    return _finish_training(lambda: train(config, folder, profile=window), config, folder, flags)


def _prune(flags: Namespace, overrides: KeyValues) -> Outcome:
    config, folder = _start_run(flags, overrides)
    from mlmoe_jax.apps.tools.prune import prune

    return _finish_training(lambda: prune(config, folder), config, folder, flags)


def _finish_training(run: Callable[[], Results], config: ConfigDict, folder: RunFolder, flags: Namespace) -> Outcome:
    """Train, write sample images and return the results. A stop is a message and exit code 130."""
    from mlmoe_jax.inference.explain import write_requested_samples
    from mlmoe_jax.training.loop import Stopped

    try:
        results = run()
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return Outcome(exit_code=INTERRUPTED)
    write_requested_samples(folder, config)
    if config.eval.select_on == "test":
        print("selected on test, as published", file=sys.stderr)
    if flags.json:
        print(f"run folder: {folder}", file=sys.stderr)
    return _show_results(results, flags, f"run folder: {folder}")


def _show_results(results: Results, flags: Namespace, *notes: str) -> Outcome:
    from mlmoe_jax.evaluation.measure import results_table

    if not (flags.json or flags.verbose):
        print("results.json has all metrics, and --verbose prints them", file=sys.stderr)
    return Outcome([results_table(results, every=flags.verbose), *notes])


def _sweep(flags: Namespace, overrides: KeyValues) -> Outcome:
    from mlmoe_jax.apps.papers.grid import METHOD, GridPoint, combine_axes, method_points, parse_sweep
    from mlmoe_jax.apps.papers.sweep import sweep
    from mlmoe_jax.config import default_config

    axes = parse_sweep(flags.sweep, default_config())
    if both := axes.keys() & {key for key, _ in overrides}:
        raise UserError(f"{min(both)} is set by --sweep and by --config.{min(both)}; leave one out")
    methods = axes.pop(METHOD, None)
    if methods is None:  # the config without the swept values may be invalid
        config, folder = _start_run(flags, overrides)
        bases = [GridPoint("", {}, config)]
    else:
        bases, folder = method_points(methods, overrides), _open_folder(flags)
        cache_programs()
    return sweep(combine_axes(bases, axes), folder)


def _reproduce(flags: Namespace, overrides: KeyValues) -> Outcome:
    from mlmoe_jax.apps.papers.request import WORKDIR, dry_run, parse_request

    options = {"only": flags.only, "dataset": flags.dataset, "root": flags.root, "seeds": flags.seeds}
    request = parse_request(flags.table, overrides=overrides, **options)
    workdir = flags.workdir or WORKDIR
    if flags.dry_run:
        return Outcome([dry_run(request, workdir)])
    from mlmoe_jax.apps.papers.reproduce import reproduce
    from mlmoe_jax.runs.folder import RunFolder

    cache_programs()
    return reproduce(request, RunFolder(workdir))


def _import(flags: Namespace, overrides: KeyValues) -> Outcome:
    config, folder = _start_run(flags, overrides)
    from mlmoe_jax.apps.tools.import_run import import_run

    import_run(config, folder)
    return Outcome([f"run folder: {folder}"])


# ------------------------------------------------------------------------------------------------------ look at a model
def _eval(flags: Namespace, overrides: KeyValues) -> Outcome:
    folder = _open_folder(flags)
    cache_programs()
    from mlmoe_jax.evaluation.evaluate import evaluate_opened
    from mlmoe_jax.runs.restore import open_run

    run = open_run(folder, overrides, which=flags.checkpoint)
    outcome = _show_results(evaluate_opened(folder, run), flags)
    return replace(outcome, exit_code=OUTDATED if run.outdated else DONE)


def _thresholds(flags: Namespace, overrides: KeyValues) -> Outcome:
    from mlmoe_jax.apps.tools.fit_thresholds import fit_run

    return fit_run(_open_folder(flags), overrides)


def _calibrate(flags: Namespace, overrides: KeyValues) -> Outcome:
    from mlmoe_jax.apps.tools.calibrate import calibrate_run

    return calibrate_run(_open_folder(flags), overrides)


def _compare(flags: Namespace, overrides: KeyValues) -> Outcome:
    from mlmoe_jax.apps.tools.compare import compare_folders
    from mlmoe_jax.runs.folder import RunFolder

    first, second = map(RunFolder, flags.workdir)
    return compare_folders(first, second, split=flags.split, output=flags.output)


def _report(flags: Namespace, overrides: KeyValues) -> Outcome:
    from mlmoe_jax.apps.report.page import write_report
    from mlmoe_jax.runs.folder import RunFolder

    against = RunFolder(flags.against) if flags.against else None
    path = write_report(_open_folder(flags), against=against, output=flags.output, cost=flags.cost)
    return Outcome([f"report: {path}"])


# --------------------------------------------------------------------------------------------------------- use a model
def _check_format(flags: Namespace) -> None:
    known = TARGETS if flags.mode == "export" else FORMATS
    if flags.format and flags.format not in known:
        raise UserError(f"--format={flags.format} is not for --mode={flags.mode}; there are {', '.join(known)}")


def _check_predict(flags: Namespace) -> None:
    _check_format(flags)
    if bool(flags.select) != bool(flags.count):
        raise UserError("--select and --count belong together, as in --select=both --count=100; give both or none")


def _predict(flags: Namespace, overrides: KeyValues) -> Outcome:
    folder = _open_folder(flags)
    cache_programs()
    from mlmoe_jax.apps.tools.predict_files import choose_target, predict_files
    from mlmoe_jax.runs.folder import RunFolder

    target = choose_target(
        flags.output,
        RunFolder(".") if is_shared(flags.workdir) else folder,
        json_lines=flags.json,
        gates=flags.gates,
        form=flags.format,
        select=bool(flags.select),
    )
    return predict_files(
        folder,
        flags.images,
        target,
        overrides,
        checkpoint=flags.checkpoint,
        batch_size=flags.batch_size,
        top_k=flags.top_k,
        gates=flags.gates,
        select=flags.select,
        count=flags.count,
    )


def _serve(flags: Namespace, overrides: KeyValues) -> Outcome:
    from mlmoe_jax.apps import serving

    serving.require_libraries()
    from mlmoe_jax.apps.serving.server import serve

    folder = _open_folder(flags)
    cache_programs()
    return serve(folder, overrides, host=flags.host, port=flags.port, checkpoint=flags.checkpoint)


def _export(flags: Namespace, overrides: KeyValues) -> Outcome:
    folder = _open_folder(flags)
    cache_programs()
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
        images=flags.images,
        count=flags.calibration_images,
    )


def _push(flags: Namespace, overrides: KeyValues) -> Outcome:
    from mlmoe_jax.apps.hub.push import push

    options = {"private": flags.private, "revision": flags.revision, "license_name": flags.license}
    return push(_open_folder(flags), flags.repo, output=flags.output, **options)


# ------------------------------------------------------------------------------------------------------------- prepare
def _check_data(flags: Namespace) -> None:
    if flags.audit and flags.sample:
        raise UserError("--audit takes all images; leave --sample out")
    if flags.output and not flags.audit:
        raise UserError("--mode=data writes files only with --audit; add it, or leave --output out")


def _data(flags: Namespace, overrides: KeyValues) -> Outcome:
    config = _load_config(flags.config, overrides)
    if flags.audit:
        from mlmoe_jax.apps.audit.suggestions import audit_data

        cache_programs()
        return audit_data(config, flags.output)
    from mlmoe_jax.apps.tools.check import check_data, report_outcome

    return report_outcome(check_data(config, flags.sample))


def _pack(flags: Namespace, overrides: KeyValues) -> Outcome:
    config = _load_config(flags.config, overrides)
    from mlmoe_jax.apps.tools.label_files import write_labels
    from mlmoe_jax.apps.tools.pack import pack

    return write_labels(config, flags.format, flags.output) if flags.format else pack(config, flags.output)


def _features(flags: Namespace, overrides: KeyValues) -> Outcome:
    config = _load_config(flags.config, overrides)
    from mlmoe_jax.apps.tools.feature_files import write_features

    cache_programs()
    return write_features(config, flags.output)


def _check_summary(flags: Namespace) -> None:
    if bool(flags.config) == bool(flags.configs):
        raise UserError("--mode=summary needs either --config=FILE or --configs=FILE,FILE,…")


def _summary(flags: Namespace, overrides: KeyValues) -> Outcome:
    from mlmoe_jax.apps.tools.preflight.cost import cost_outcome, count_cost
    from mlmoe_jax.config import split_references

    references = [flags.config] if flags.config else split_references(flags.configs)
    costs = {reference: count_cost(_load_config(reference, overrides)) for reference in references}
    return Outcome(cost_outcome(costs).parts, document=costs if flags.configs else costs[flags.config])


def _compile(flags: Namespace, overrides: KeyValues) -> Outcome:
    config = _load_config(flags.config, overrides)
    from mlmoe_jax.apps.tools.preflight.compile_check import check_outcome, check_steps

    options = {"find_batch": flags.find_batch, "num_labels": flags.labels, "quick": flags.quick}
    return check_outcome(check_steps(config, flags.topology, **options))


# --------------------------------------------------------------------------------------------------------- the commands
NEEDS_CONFIG = {"config": "FILE, such as --config=configs/mlvpt_digits.py"}
NEEDS_FOLDER = {"workdir": "FOLDER"}
STORED = "the run folder"  # where the config of a trained model comes from

COMMANDS: dict[str, Command] = {
    "train": Command(
        TRAIN,
        "train a model, or resume its training, and evaluate it (the default)",
        "--config=mlvpt_digits --workdir=runs/digits --config.optim.learning_rate=3e-4",
        _train,
        flags=("verbose", "sweep", "profile", "init-from"),
        needs=NEEDS_CONFIG,
        together=True,
        check=_check_train,
    ),
    "prune": Command(
        TRAIN,
        "train, prune the prompts, and train again (E2VPT)",
        "--config=e2vpt --workdir=runs/pruned",
        _prune,
        flags=("verbose", "init-from"),
        needs=NEEDS_CONFIG,
        together=True,
    ),
    "reproduce": Command(
        TRAIN,
        "train the rows of a published table and print them beside its numbers",
        "--table=mlvpt.1 --dataset=digits --dry-run",
        _reproduce,
        flags=("table", "only", "dataset", "root", "seeds", "dry-run"),
        config_from="--table",
        together=True,
    ),
    "import": Command(
        TRAIN,
        "make a run folder of a checkpoint of the authors' code",
        "--config=mlvpt_vit --init-from=checkpoint.pth --workdir=runs/published",
        _import,
        flags=("init-from",),
        needs=NEEDS_CONFIG,
    ),
    "eval": Command(
        INSPECT,
        "evaluate a trained model again; its results replace earlier ones",
        "--workdir=runs/digits --config.data.test_splits=val",
        _eval,
        flags=("verbose", "checkpoint"),
        needs=NEEDS_FOLDER,
        config_from=STORED,
        together=True,
    ),
    "thresholds": Command(
        INSPECT,
        "fit the thresholds of a trained model to the scores of a split",
        "--workdir=runs/digits --config.thresholds.per=global",
        _thresholds,
        needs=NEEDS_FOLDER,
        config_from=STORED,
    ),
    "calibrate": Command(
        INSPECT,
        "correct the scores of a trained model, fitted to a split, so that 0.7 means 70 %",
        "--workdir=runs/digits --config.calibration.method=temperature",
        _calibrate,
        needs=NEEDS_FOLDER,
        config_from=STORED,
    ),
    "report": Command(
        INSPECT,
        "write one HTML page about a run",
        "--workdir=runs/digits",
        _report,
        flags=("against", "cost", "output"),
        needs=NEEDS_FOLDER,
        output="an .html file (default: report.html in the run folder)",
        config_from=STORED,
        takes_keys=False,
    ),
    "compare": Command(
        INSPECT,
        "compare the results of two runs",
        "--workdir=runs/first --workdir=runs/second",
        _compare,
        flags=("split", "output"),
        needs={"workdir": "FOLDER twice, once for each run"},
        output="a .csv file",
        folders=2,
        config_from=STORED,
        takes_keys=False,
    ),
    "predict": Command(
        USE,
        "label images",
        "--workdir=runs/digits --images photos --output=labels.csv",
        _predict,
        flags=("images", "format", "checkpoint", "top-k", "gates", "select", "count", "batch-size", "output"),
        needs={**NEEDS_FOLDER, "images": "FOLDER or image files"},
        output="a .csv or .jsonl file, a file or folder of the --format, or - for stdout (default: stdout with "
        "--json, otherwise predictions.csv, selected.csv with --select, or with --gates .jsonl, in the run folder or, "
        "for hf: and demo:, in the working directory)",
        reads_shared=True,
        config_from=STORED,
        together=True,
        check=_check_predict,
    ),
    "serve": Command(
        USE,
        "label images over HTTP and on a web page",
        "--workdir=runs/digits --port=8000",
        _serve,
        flags=("checkpoint", "host", "port"),
        needs=NEEDS_FOLDER,
        reads_shared=True,
        config_from=STORED,
    ),
    "export": Command(
        USE,
        "write a trained model for use without this package",
        "--workdir=runs/digits --format=onnx --output=exported",
        _export,
        flags=("images", "format", "include-frozen", "calibration-images", "merge", "template", "checkpoint", "output"),
        needs={**NEEDS_FOLDER, "output": "FILE, a .safetensors or .npz file, or a folder with --format"},
        output="a .safetensors or .npz file, or a folder with --format",
        reads_shared=True,
        config_from=STORED,
        check=_check_format,
    ),
    "push": Command(
        USE,
        "share a trained model on the Hugging Face hub",
        "--workdir=runs/digits --repo=ada/digits --license=apache-2.0",
        _push,
        flags=("repo", "revision", "private", "license", "output"),
        needs={**NEEDS_FOLDER, "repo": "USER/NAME, the name that the model gets on the hub"},
        output="a folder for the files to inspect them; nothing is uploaded",
        config_from=STORED,
        takes_keys=False,
    ),
    "data": Command(
        PREPARE,
        "check the images and labels of a data set",
        "--config=own_csv:root=photos",
        _data,
        flags=("sample", "audit", "output"),
        needs=NEEDS_CONFIG,
        output="of --audit: a folder (default: audit)",
        folders=0,
        check=_check_data,
    ),
    "pack": Command(
        PREPARE,
        "write a data set as a few large files, or its labels for a labeling tool",
        "--config=own_csv:root=photos --output=packed",
        _pack,
        flags=("format", "output"),
        needs={**NEEDS_CONFIG, "output": "FOLDER, a folder or an address such as gs://bucket/folder"},
        output="a folder, an address such as gs://bucket/folder, or a file or folder of the --format with {split}",
        folders=0,
        check=_check_format,
    ),
    "features": Command(
        PREPARE,
        "write the features of a backbone",
        "--config=own_csv:root=photos --output=features",
        _features,
        flags=("output",),
        needs={**NEEDS_CONFIG, "output": "FOLDER"},
        output="a folder",
        folders=0,
    ),
    "summary": Command(
        PREPARE,
        "count parameters, multiply-adds and memory; nothing is trained",
        "--configs=mlvpt_digits,linear_probe",
        _summary,
        flags=("configs",),
        folders=0,
        check=_check_summary,
    ),
    "compile": Command(
        PREPARE,
        "compile the steps for a device or a TPU slice, and tell whether they fit",
        "--config=mlvpt_digits --topology=v5e:4x4",
        _compile,
        flags=("topology", "find-batch", "labels", "quick"),
        needs=NEEDS_CONFIG,
        folders=0,
    ),
}
