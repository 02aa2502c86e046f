"""The command line: `mlmoe MODE --config=… --workdir=…`, or `python -m mlmoe_jax.main --mode=MODE …`.

Results go to stdout, messages to stderr. Exit codes:

    0    done
    1    `--mode=data` found problems, or `--mode=compile` found a step that does not fit its devices
    2    user error, explained in one sentence
    3    done, but from an older checkpoint, because the newest checkpoint is damaged
    4    the disk is full, read-only or failing
    130  interrupted by SIGTERM or Ctrl-C; training saves a checkpoint first
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence

from mlmoe_jax.apps.cli.flags import is_shared, named_mode, parse_flags
from mlmoe_jax.apps.cli.process import explain, flush_output, run_job, warnings_printed
from mlmoe_jax.apps.cli.program_cache import cache_programs
from mlmoe_jax.errors import DONE, INTERRUPTED, OUTDATED, UserError
from mlmoe_jax.runtime.preemption import interruptible
from mlmoe_jax.runtime.table import Outcome, Table

# Modes in which all processes work; in any other mode only the first process works.
TOGETHER = ("train", "reproduce", "eval", "predict", "prune")
# Modes of a --workdir that compute on the devices of this process.
COMPUTING = ("train", "eval", "predict", "serve", "prune", "import", "export")
_HELP = "--help="  # followed by a section or a key of the config; --help alone is about the modes


def _load_config(reference: str, overrides: list[tuple[str, str]]):
    import mlmoe_jax.config as configuration

    loaded = configuration.load_config(reference, overrides)
    configuration.validate(loaded)
    return loaded


def _workdir(flags: argparse.Namespace):
    from mlmoe_jax.runs.shared_model import run_folder

    folder = run_folder(flags.workdir)
    if flags.mode in COMPUTING:
        cache_programs()
    return folder


def _new_run(flags: argparse.Namespace, overrides: list[tuple[str, str]], *, validate: bool = True):
    """Return the config and the folder of a run that starts or resumes: --workdir, or a name from the command."""
    import mlmoe_jax.config as configuration
    from mlmoe_jax.runs.folder import RunFolder, stored_config
    from mlmoe_jax.runs.naming import RUNS, default_folder, run_name

    def resumed():
        if flags.sweep:  # each run has its own folder
            return None
        name = run_name(flags.config, overrides, mode=flags.mode)  # configs that read the data are for own data
        folder = RunFolder(f"{RUNS}/{name}" if flags.workdir is None else flags.workdir)
        folder.require_place()
        return stored_config(folder)

    config = configuration.load_config(flags.config, overrides, run=resumed)
    if validate:
        configuration.validate(config)
    if flags.workdir is None:
        from mlmoe_jax.runtime.progress import status

        flags.workdir = default_folder(flags.config, overrides, config, mode=flags.mode, sweep=flags.sweep)
        status(f"run folder: {flags.workdir}")
    return config, _workdir(flags)


def _train(flags: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    if flags.sweep and flags.profile:
        raise UserError("--profile traces one training; leave it out of a --sweep")
    if flags.sweep:
        return _sweep(flags, overrides)
    config, folder = _new_run(flags, overrides)
    from mlmoe_jax.training.loop import train
    from mlmoe_jax.training.profiling import Window

    window = Window.parse(flags.profile) if flags.profile else None
    return _finish_training(lambda: train(config, folder, profile=window), config, folder, flags)


def _prune(flags: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    config, folder = _new_run(flags, overrides)
    from mlmoe_jax.apps.tools.prune import prune

    return _finish_training(lambda: prune(config, folder), config, folder, flags)


def _finish_training(run: Callable[[], dict], config, folder, flags: argparse.Namespace) -> int:
    """Train, write the requested samples and print the results; or print that training was stopped."""
    from mlmoe_jax.inference.explain import write_requested_samples
    from mlmoe_jax.training.loop import Stopped

    try:
        results = run()
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return INTERRUPTED
    write_requested_samples(folder, config)
    _print_results(results, flags)
    if config.eval.select_on == "test":
        print("selected on test, as published", file=sys.stderr)
    print(f"run folder: {folder}", file=sys.stderr if flags.json else sys.stdout)
    return DONE


def _sweep(flags: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    from mlmoe_jax.apps.papers.grid import METHOD, Point, combine, method_points
    from mlmoe_jax.apps.papers.grid import parse as parse_sweep
    from mlmoe_jax.apps.papers.sweep import sweep
    from mlmoe_jax.config import default_config

    axes = parse_sweep(flags.sweep, default_config())
    if both := axes.keys() & {key for key, _ in overrides}:
        raise UserError(f"{min(both)} is set by --sweep and by --config.{min(both)}; leave one out")
    methods = axes.pop(METHOD, None)
    if methods is None:  # the config without the swept values may be invalid
        config, folder = _new_run(flags, overrides, validate=False)
        bases = [Point("", {}, config)]
    else:
        bases, folder = method_points(methods, overrides), _workdir(flags)
    return sweep(combine(bases, axes), folder, as_json=flags.json)


def _reproduce(flags: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    from mlmoe_jax.apps.papers.request import WORKDIR, dry_run, parse_request

    options = {"only": flags.only, "dataset": flags.dataset, "root": flags.root, "seeds": flags.seeds}
    request = parse_request(flags.table, overrides=overrides, **options)
    workdir = flags.workdir or WORKDIR
    if flags.dry_run:
        print(dry_run(request, workdir))
        return DONE
    from mlmoe_jax.apps.papers.reproduce import reproduce
    from mlmoe_jax.runs.folder import RunFolder

    cache_programs()
    return reproduce(request, RunFolder(workdir), as_json=flags.json)


def _eval(flags: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    folder = _workdir(flags)
    from mlmoe_jax.evaluation.evaluate import evaluate_opened
    from mlmoe_jax.runs.restore import open_run
    from mlmoe_jax.runs.thresholds import stored_thresholds

    fitted = stored_thresholds(folder)  # before the model, which takes longer to read
    run = open_run(folder, overrides, which=flags.checkpoint)
    _print_results(evaluate_opened(folder, run, fitted), flags)
    return OUTDATED if run.outdated else DONE


def _thresholds(flags: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    folder = _workdir(flags)
    from mlmoe_jax.apps.tools.fit_thresholds import fit_run

    return fit_run(folder, overrides, as_json=flags.json)


def _calibrate(flags: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    folder = _workdir(flags)
    from mlmoe_jax.apps.tools.calibrate import calibrate_run

    return calibrate_run(folder, overrides, as_json=flags.json)


def _predict(flags: argparse.Namespace, overrides: list[tuple[str, str]]) -> Outcome:
    folder = _workdir(flags)
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


def _serve(flags: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    from mlmoe_jax.apps import serving

    serving.require_libraries()
    from mlmoe_jax.apps.serving.server import serve

    return serve(_workdir(flags), overrides, host=flags.host, port=flags.port, checkpoint=flags.checkpoint)


def _compare(flags: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    from mlmoe_jax.apps.tools.compare import compare_folders
    from mlmoe_jax.runs.folder import RunFolder

    first, second = map(RunFolder, flags.workdir)
    return compare_folders(first, second, split=flags.split, output=flags.output, as_json=flags.json)


def _report(flags: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    folder = _workdir(flags)
    from mlmoe_jax.apps.report.page import write_report
    from mlmoe_jax.runs.folder import RunFolder

    against = RunFolder(flags.against) if flags.against else None
    path = write_report(folder, against=against, output=flags.output, cost=flags.cost)
    print(f"report: {path}")
    return DONE


def _summary(flags: argparse.Namespace, overrides: list[tuple[str, str]]) -> Outcome:
    from mlmoe_jax.apps.tools.preflight.cost import cost_outcome, count_cost
    from mlmoe_jax.config import split_references

    references = [flags.config] if flags.config else split_references(flags.configs)
    costs = {reference: count_cost(_load_config(reference, overrides)) for reference in references}
    outcome = cost_outcome(costs)
    return outcome if flags.configs else dataclasses.replace(outcome, document=costs[flags.config])


def _compile(flags: argparse.Namespace, overrides: list[tuple[str, str]]) -> Outcome:
    config = _load_config(flags.config, overrides)
    from mlmoe_jax.apps.tools.preflight.compile_check import check_outcome, check_steps

    options = {"find_batch": flags.find_batch, "num_labels": flags.labels, "quick": flags.quick}
    return check_outcome(check_steps(config, flags.topology, **options))


def _data(flags: argparse.Namespace, overrides: list[tuple[str, str]]) -> int | Outcome:
    config = _load_config(flags.config, overrides)
    if flags.audit:
        from mlmoe_jax.apps.audit.audit import audit

        cache_programs()
        return audit(config, flags.output, as_json=flags.json)
    from mlmoe_jax.apps.tools.check import check_data, report_outcome

    return report_outcome(check_data(config, flags.sample))


def _pack(flags: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    config = _load_config(flags.config, overrides)
    from mlmoe_jax.apps.tools.label_files import write_labels
    from mlmoe_jax.apps.tools.pack import pack

    return write_labels(config, flags.format, flags.output) if flags.format else pack(config, flags.output)


def _features(flags: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    config = _load_config(flags.config, overrides)
    from mlmoe_jax.apps.tools.feature_files import write_features

    cache_programs()
    return write_features(config, flags.output)


def _import(flags: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    config, folder = _new_run(flags, overrides)
    from mlmoe_jax.apps.tools.import_run import import_run

    import_run(config, folder)
    print(f"run folder: {folder}")
    return DONE


def _export(flags: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    folder = _workdir(flags)
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


def _push(flags: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    from mlmoe_jax.apps.hub.push import push

    how = {"private": flags.private, "revision": flags.revision, "license_name": flags.license}
    return push(_workdir(flags), flags.repo, output=flags.output, **how)


def _print_results(results: dict, flags: argparse.Namespace) -> None:
    from mlmoe_jax.evaluation.evaluate import format_results
    from mlmoe_jax.runtime.formats import to_json

    print(to_json(results, indent=2) if flags.json else format_results(results, every=flags.verbose))
    if not (flags.json or flags.verbose):
        print("results.json has all metrics, and --verbose prints them", file=sys.stderr)


MODES: dict[str, Callable[[argparse.Namespace, list[tuple[str, str]]], int | Table | Outcome]] = {
    "train": _train,
    "reproduce": _reproduce,
    "eval": _eval,
    "thresholds": _thresholds,
    "calibrate": _calibrate,
    "predict": _predict,
    "serve": _serve,
    "compare": _compare,
    "report": _report,
    "summary": _summary,
    "compile": _compile,
    "data": _data,
    "pack": _pack,
    "features": _features,
    "prune": _prune,
    "import": _import,
    "export": _export,
    "push": _push,
}


def main(arguments: Sequence[str]) -> int:
    """Run one command; return its exit code."""
    try:
        with interruptible(INTERRUPTED), warnings_printed():
            code = _run(arguments)
            flush_output()
            return code
    except (Exception, KeyboardInterrupt) as error:
        if (code := explain(error)) is None:
            raise
        return code


def _run(arguments: Sequence[str]) -> int:
    if topics := [word.removeprefix(_HELP) for word in arguments if word.startswith(_HELP)]:
        from mlmoe_jax.apps.cli.reference import describe

        print("\n\n".join(map(describe, topics)))
        return DONE
    if "--help" in arguments or "-h" in arguments:
        from mlmoe_jax.apps.cli.help import help_of

        print(help_of(named_mode(arguments)))
        return DONE
    flags, overrides = parse_flags(arguments)

    def work() -> int:
        outcome = MODES[flags.mode](flags, overrides)
        return outcome if isinstance(outcome, int) else print_outcome(outcome, flags)

    return run_job(work, together=flags.mode in TOGETHER)


def print_outcome(outcome: Table | Outcome, flags: argparse.Namespace) -> int:
    """Print what a command returns, as text or with --json as JSON; return the exit code."""
    if isinstance(outcome, Table):
        outcome = Outcome([outcome])
    if outcome.parts:
        print(outcome.json() if flags.json else outcome.text())
    return outcome.exit_code
