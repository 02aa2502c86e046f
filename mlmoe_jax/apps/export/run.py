"""`--mode=export`: a run in a format that other programs read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from mlmoe_jax.apps.export import standalone
from mlmoe_jax.apps.export.description import describe, readme
from mlmoe_jax.apps.export.onnx import require_converter, write_onnx
from mlmoe_jax.apps.export.program import largest_difference, weights_of
from mlmoe_jax.apps.export.stablehlo import write_stablehlo
from mlmoe_jax.errors import DONE, OUTDATED, UserError
from mlmoe_jax.inference.predict import Predictor
from mlmoe_jax.runs.assemble import abstract_parts
from mlmoe_jax.runs.folder import RunFolder
from mlmoe_jax.runs.restore import BEST, Run
from mlmoe_jax.runtime.formats import to_json
from mlmoe_jax.runtime.progress import status
from mlmoe_jax.runtime.storage import require_new, whole_file, whole_folder

SAFETENSORS = "safetensors"
ALWAYS, AUTO, NEVER = "always", "auto", "never"  # as in checkpoint.include_frozen
# Larger differences of a probability mean that the program is wrong; rounding in 16 bits stays below.
_WRONG = 1e-2


@dataclass(frozen=True)
class _Program:
    """A format that is a folder with a program. write: (run, folder). fixed: config keys that it needs."""

    write: Callable[[Run, Path], None]
    require: Callable[[], None] = lambda: None
    fixed: tuple[tuple[str, str], ...] = ()


PROGRAMS = {
    "stablehlo": _Program(write_stablehlo),
    # Runtimes have no products of bfloat16 on CPUs.
    "onnx": _Program(write_onnx, require_converter, (("eval.dtype", "float32"),)),
}


def export_run(
    folder: RunFolder,
    output: str,
    kind: str,
    overrides: Sequence[tuple[str, str]] = (),
    *,
    checkpoint: str = BEST,
    include_frozen: str = ALWAYS,
) -> int:
    """Export a run and print a line about it; return the exit code, 3 if the newest checkpoint is damaged.

    output: a folder for the formats of PROGRAMS, a .safetensors file for `safetensors`; it must not exist. overrides,
    checkpoint: as in `Predictor.from_run`. include_frozen: for safetensors, all frozen weights, those that no published
    file has (auto), or none.

    A program is compared with the run on random images before the folder gets its name. Raises UserError if the output
    exists or cannot be written, if a package is missing, if the run cannot be opened, and if its model has operations
    that the format has not.
    """
    path = require_new(output)
    if (path.suffix == ".safetensors") != (kind == SAFETENSORS) or path.suffix == ".onnx":
        what = "a .safetensors file" if kind == SAFETENSORS else "a folder, which will hold the program and its labels"
        raise UserError(f"--output={output} should be {what} for --format={kind}")
    program = PROGRAMS.get(kind)
    if program:
        program.require()
    folder.require_model()
    fixed = dict(program.fixed if program else ())
    for key, value in overrides:
        if value != fixed.get(key, value):
            raise UserError(f"--format={kind} needs {key}={fixed[key]}, not {value}; leave --config.{key} out")
    further = [item for item in fixed.items() if item not in overrides]
    predictor = Predictor.from_run(folder.path, [*further, *overrides], checkpoint=checkpoint)
    description = describe(predictor, kind)
    try:
        if program:
            line = _write_program(predictor.run, path, description, program)
        else:
            line = _write_tensors(predictor.run, path, description, include_frozen)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    trained = description["trained"]
    print(f"{trained['kind']} weights of step {trained['step']} as {kind}; {line}; written to {path}")
    return OUTDATED if predictor.run.outdated else DONE


def _write_program(run: Run, path: Path, description: dict[str, Any], program: _Program) -> str:
    status("tracing and converting")
    with whole_folder(path) as partial:
        program.write(run, partial)
        (partial / "model.json").write_text(to_json(description, indent=2) + "\n")
        (partial / "load.py").write_text(Path(standalone.__file__).read_text())
        (partial / "README.md").write_text(readme(description))
        status("comparing with the run")
        difference = largest_difference(run, standalone.Model(partial))
        if not difference <= _WRONG:
            raise UserError(f"the exported program differs from the run by {difference:.2g}, so it was not written")
        size = sum(file.stat().st_size for file in partial.iterdir())
    return f"{size / 1e6:,.1f} MB, largest difference of a probability {difference:.1e}"


def _write_tensors(run: Run, path: Path, description: dict[str, Any], include_frozen: str) -> str:
    kept = {
        ALWAYS: lambda: None,
        AUTO: lambda: abstract_parts(run.config, run.label_space).unpublished,
        NEVER: frozenset,
    }[include_frozen]()
    weights = weights_of(run, frozen=kept)
    with whole_file(path, alone=False) as partial:  # it may be in a run folder, whose lock another process has
        save_file(weights, partial, {"format": "mlmoe_jax", "description": to_json(description)})
    return f"{len(weights):,} tensors, {sum(value.nbytes for value in weights.values()) / 1e6:,.1f} MB"
