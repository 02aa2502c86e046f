"""Draw `docs/digits.svg`, from the tables of results in `docs/results.md`.

python -m tools.docs.draw_digits
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import altair as alt

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, CHART = DOCS / "results.md", DOCS / "digits.svg"
NAMES = {
    "linear_probe": "linear probe",
    "finetune": "fine-tuning",
    "vpt": "VPT",
    "gatevpt": "GateVPT",
    "e2vpt": "E2VPT",
    "gvpt": "GVPT",
    "mlvpt_digits": "ML-VPT",
    "cnn_rnn_resnet101": "CNN-RNN",
    "mlgcn_resnet101": "ML-GCN",
    "addgcn_resnet101": "ADD-GCN",
    "ml_decoder_resnet101": "ML-Decoder",
    "q2l_resnet101": "Q2L",
    "hsq_resnet101": "HSQ",
    "drmoe_resnet101": "DR-MoE",
    "mlmoe_dinov2": "MLMoE",
}
ORIGIN = ("ML-VPT", "DR-MoE", "MLMoE")  # the methods that this package is about
INK, GRAY, BLUE, ORANGE = "#1b1f24", "#8c959f", "#0969da", "#bc4c00"


def read_results(page: str) -> dict[str, tuple[float, float]]:
    """Return the mAP on `test` and on `test_shift`, in percent, of the methods in NAMES, in the order of `test_shift`.

    page: the Markdown of the page on results. Raises ValueError if it lacks one of them.
    """
    results = {}
    for config, *cells in re.findall(r"^\| `([^`]+)` \|.*?\| ([\d.]+) ± [^|]*\| ([\d.]+) ± ", page, re.M):
        if config in NAMES:
            results[NAMES[config]] = (float(cells[0]), float(cells[1]))
    if missing := sorted(set(NAMES.values()) - set(results)):
        raise ValueError(f"the page has no results of {', '.join(missing)}")
    return dict(sorted(results.items(), key=lambda item: item[1][1]))


def draw(results: dict[str, tuple[float, float]], path: Path) -> None:
    """Write a chart with one line per method, from its mAP without the correlations of training to that with them."""
    rows = [
        {"method": name, "test": test, "shift": shift, "numbers": f"{shift:.1f} | {test:.1f}"}
        for name, (test, shift) in results.items()
    ]
    splits = {"test": "co-occurrences as in training", "shift": "without them"}
    bold = f"indexof({list(ORIGIN)}, datum.value) >= 0 ? 'bold' : 'normal'"
    names = alt.Axis(title=None, domain=False, ticks=False, labelFontWeight=alt.ExprRef(bold), labelPadding=8)
    low = math.floor(min(shift for _, shift in results.values())) - 1
    title, scale = "mAP in percent on digits, mean of three seeds", alt.Scale(domain=[low, 101.5], nice=False)
    test, shift = (alt.X(f"{split}:Q", title=title, scale=scale) for split in splits)
    colors = alt.Scale(domain=list(splits.values()), range=[BLUE, ORANGE])
    color = alt.Color("split:N", scale=colors, legend=alt.Legend(title=None, orient="bottom-right", labelLimit=0))
    base = alt.Chart(alt.Data(values=rows)).encode(y=alt.Y("method:N", sort=[*results][::-1], axis=names))
    line = base.mark_rule(color=GRAY, strokeWidth=1.5).encode(x=shift, x2="test:Q")
    ends = [
        base.transform_calculate(split=f"'{splits[split]}'")
        .mark_point(filled=True, size=60, opacity=1)
        .encode(x=x, color=color)
        for split, x in (("test", test), ("shift", shift))
    ]
    text = base.mark_text(align="left", dx=7, color=INK, fontSize=11).encode(x=test, text="numbers:N")
    chart = alt.layer(line, *ends, text, width=600, height=24 * len(rows)).configure_view(stroke=None)
    chart = chart.configure_axis(
        labelFontSize=12, titleFontSize=12, titleFontWeight="normal", grid=False, labelColor=INK
    )
    chart.configure_legend(labelFontSize=12).save(path, format="svg")


if __name__ == "__main__":
    draw(read_results(PAGE.read_text()), CHART)
