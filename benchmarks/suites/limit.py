"""limit: how close the step is to the measured rates of this machine."""

from __future__ import annotations

from benchmarks import harness
from benchmarks.suites import step
from benchmarks.suites.cases import Settings, key, sizes_of

# side of the square matrices, entries of the added vectors
RATES = {"cpu": (2048, 2**25), "gpu": (8192, 2**28), "tpu": (8192, 2**28)}


def run(settings: Settings, workers: harness.Workers, results: harness.Results) -> list[str]:
    """Return tables of the machine's rates, and of whole steps."""
    side = workers.sides[0]
    rates, rows = {}, []
    for dtype in settings.dtypes:
        for one in workers.sides:
            if one.options.get("compile"):
                continue
            if outcome := results.measure("limit", f"rates {dtype} {one.name}", _rates, settings, workers, one, dtype):
                rows.append([one.name, dtype, f"{outcome['flops'] / 1e9:,.0f}", f"{outcome['bytes'] / 1e9:,.1f}"])
                if one is side:
                    rates[dtype] = outcome
    whole = [row for dtype in rates for row in _whole(settings, workers, results, side, dtype, rates[dtype])]
    tables = (
        ("Rates of this machine", ("", "type", "matmul, GFLOP/s", "memory, GB/s"), rows, ()),
        (
            "Whole steps",
            ("", "type", "batch", "mode", "s/step", "GFLOP", "GFLOP/s", "share of the matmul rate", "GB accessed"),
            whole,
            ("GFLOP as traced, before optimization; GB accessed as the compiler counts, caches included.",),
        ),
    )
    return [harness.table(*table) for table in tables]


def _rates(settings: Settings, workers: harness.Workers, side: harness.Side, dtype: str) -> dict[str, float]:
    """Return the best rates in FLOP/s and bytes/s over the rounds."""
    product, vector = (256, 2**16) if settings.quick else RATES.get(settings.platform, RATES["cpu"])
    rates = {}
    for what, size, unit in (("product", product, "flops"), ("sum", vector, "bytes")):
        of = {"mode": "rate", "what": what, "size": size, "dtype": dtype}
        result = harness.rounds_of(workers, [side], of, settings.rounds)[side.name]
        if "error" in result:
            raise harness.Failed(result["error"])
        rates[unit] = result[unit] / min(one["seconds"] for one in result["rounds"])
    return rates


def _whole(settings, workers, results, side, dtype: str, rates: dict[str, float]) -> list[list[str]]:
    rows = []
    for of in step.cases(settings):
        if of["dtype"] != dtype or of["mode"] == "predict":
            continue
        given = (workers, [side], of, settings.rounds)
        outcome = results.measure("limit", key(of, side.name), harness.rounds_of, *given)
        if not outcome or "error" in (result := outcome[side.name]):
            continue
        spread = harness.seconds(result)
        speed = result["flops"] / spread.median
        start = [sizes_of(of), dtype, str(of["batch"]), of["mode"], spread.text() + harness.mark(result)]
        work = [harness.number(count / 1e9) for count in (result["flops"], speed, result["bytes"] or 0)]
        rows.append([*start, *work[:2], f"{speed / rates['flops']:.0%}", work[2]])
    return rows
