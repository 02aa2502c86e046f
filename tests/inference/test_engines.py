"""`mm.BatchLabeler` and the model of MLflow in clusters of two workers, by the programs of docs/corpus.md."""

import json
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from helpers.documents import program_with
from helpers.drawn_images import encoded
from helpers.outside import outside_python, run_outside
from helpers.paths import REPOSITORY
from pyarrow import parquet

from mlmoe_jax.main import main

ROWS, BROKEN, ABSENT = 60, 7, 8
_PREPARED = """
UNKNOWN = "nan", "None"  # Spark turns the NaN of pandas into NULL
import glob, json, os, sys
import mlmoe_jax as mm, pyarrow, pyarrow.dataset

class Labeler(mm.BatchLabeler):  # says where it runs
    def __call__(self, batch):
        labeled = super().__call__(batch)
        return labeled.append_column("process", pyarrow.array([os.getpid()] * len(batch), pyarrow.int64()))

    def spark_schema(self, columns):
        return super().spark_schema(columns) + ", process BIGINT"

mm.BatchLabeler = Labeler
"""
_COMPARED = """
rows = pyarrow.dataset.dataset("labels", format="parquet").to_table().sort_by("id").to_pylist()
expected = mm.Predictor.from_run("demo:photographs")(sorted(glob.glob("files/*.jpg")), batch_size=32)
for row, one in zip(rows, expected, strict=True):
    assert row["labels"] == list(one.labels), (row, one)
    assert row["scores"] == [*one.scores.values()] if one.scores else str(row["scores"][0]) in UNKNOWN, (row, one)
    assert bool(row["error"]) == bool(one.error), (row, one)
    assert row["image"] == (None if "NoneType" in row["error"] else os.path.basename(one.image)), (row, one)
unreadable, processes = [row["id"] for row in rows if row["error"]], {row["process"] for row in rows}
print(json.dumps([len(rows), unreadable, len(processes)]))
"""
_RAY = """
import ray
ray.init(num_cpus=4, include_dashboard=False)
ray.data.DataContext.get_current().enable_progress_bars = False
"""
_SPARK = """
from pyspark.sql import SparkSession
os.environ["PYSPARK_PYTHON"] = sys.executable
SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with images in Parquet files, as the datasets library writes them, and as files."""
    draw, rows = np.random.default_rng(0), []
    (tmp_path / "files").mkdir()
    (tmp_path / "images").mkdir()
    for row in range(ROWS):
        pixels = np.kron(draw.integers(0, 256, (8, 10, 3)), np.ones((30, 30, 1))).astype(np.uint8)
        content = b"no image" if row in (BROKEN, ABSENT) else encoded(pixels, "JPEG")
        (tmp_path / "files" / f"{row:03}.jpg").write_bytes(content)
        rows.append({"id": row, "image": None if row == ABSENT else {"bytes": content, "path": f"{row:03}.jpg"}})
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    schema = pyarrow.schema([("id", pyarrow.int64()), ("image", kind)])
    for part in range(4):
        parquet.write_table(pyarrow.Table.from_pylist(rows[part::4], schema), tmp_path / "images" / f"{part}.parquet")
    return tmp_path


def ran(python: str, folder: Path, code: str) -> object:
    """Run a program with this package in a folder, and return what its last line has."""
    variables = {
        "PYTHONPATH": str(REPOSITORY),
        "JAX_PLATFORMS": "cpu",
        "RAY_worker_niceness": "0",  # beside other tests, a worker with Ray's 15 gets no processor time
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    return json.loads(run_outside(python, code, cwd=folder, **variables).splitlines()[-1])


@pytest.mark.slow
@pytest.mark.budget(120)
def test_ray_labels_a_table_as_the_predictor_does(folder):
    python = outside_python("ray.data, flax, grain")
    program = program_with("ray", "corpus.md").replace("batch_size=256", "batch_size=8")
    several = program.replace('read_parquet("images")', 'read_parquet("images").repartition(8)')
    assert several.count("8") == 2, "several batches, for both workers"
    assert ran(python, folder, _PREPARED + _RAY + several + _COMPARED) == [ROWS, [BROKEN, ABSENT], 2]


@pytest.mark.slow
@pytest.mark.budget(120)
@pytest.mark.parametrize("method", ["mapInArrow", "mapInPandas"])
def test_spark_labels_a_table_as_the_predictor_does(folder, method):
    python = outside_python("pyspark.sql, flax, grain, pandas")
    program = program_with("mapInArrow", "corpus.md").replace("mapInArrow", method)
    prepared = _PREPARED
    if method == "mapInPandas":
        prepared = prepared.replace("labeled.append_column(", "labeled.assign(process=os.getpid())  # (")
    assert ran(python, folder, prepared + _SPARK + program + _COMPARED) == [ROWS, [BROKEN, ABSENT], 2]


_SCORES = """
rows = pyarrow.dataset.dataset("scores", format="parquet").to_table().sort_by("id").to_pylist()
expected = mm.Predictor.from_run("demo:photographs", {"calibration.use": False})
for row in rows:
    one = expected(f"files/{row['id']:03}.jpg")
    assert all(abs(row["scores"][name] - score) < 1e-6 for name, score in one.scores.items()), (row, one)
print(len(rows))
"""


@pytest.mark.slow
@pytest.mark.budget(120)
def test_the_model_of_mlflow_is_a_function_of_spark(folder):
    python = outside_python("pyspark.sql, mlflow, flax, grain, pandas")
    options = ("--workdir=demo:photographs", "--format=stablehlo", "--template=mlflow")
    assert main(["--mode=export", *options, f"--output={folder / 'classifier'}"]) == 0
    program = program_with("spark_udf", "corpus.md")
    readable = program.replace('"images")', f'"images").filter("id NOT IN ({BROKEN}, {ABSENT})")')
    assert readable != program
    assert ran(python, folder, _PREPARED + _SPARK + readable + _SCORES) == ROWS - 2
