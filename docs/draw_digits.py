"""Draw `docs/digits.svg`, the README's chart, from the tables of results in `docs/methods.md`.

python docs/draw_digits.py
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib

DOCS = Path(__file__).parent
PAGE, CHART = DOCS / "methods.md", DOCS / "digits.svg"
NAMES = {
    "linear_probe:dataset=digits": "linear probe",
    "finetune:dataset=digits": "fine-tuning",
    "vpt:dataset=digits": "VPT",
    "gatevpt:dataset=digits": "GateVPT",
    "e2vpt:dataset=digits": "E2VPT",
    "gvpt:dataset=digits": "GVPT",
    "mlvpt_digits": "ML-VPT",
    "cnn_rnn_resnet101:dataset=digits": "CNN-RNN",
    "mlgcn_resnet101:dataset=digits": "ML-GCN",
    "addgcn_resnet101:dataset=digits": "ADD-GCN",
    "ml_decoder_resnet101:dataset=digits": "ML-Decoder",
    "q2l_resnet101:dataset=digits": "Q2L",
    "hsq_resnet101:dataset=digits": "HSQ",
    "drmoe_resnet101:dataset=digits": "DR-MoE",
    "mlmoe_dinov2:dataset=digits": "MLMoE",
}
ORIGIN = ("ML-VPT", "DR-MoE", "MLMoE")  # the methods that this package is about
INK, GRAY, BLUE, ORANGE = "#1b1f24", "#8c959f", "#0969da", "#bc4c00"


def read_results(page: str) -> dict[str, tuple[float, float]]:
    """Return the mAP on `test` and on `test_shift`, in percent, of the methods in NAMES, the best on the latter last.

    page: the Markdown of the page on methods. Raises ValueError if it lacks one of them.
    """
    found = {}
    for config, *cells in re.findall(r"^\| `([^`]+)` \|[^|]*\|[^|]*\| ([\d.]+) ± [^|]*\| ([\d.]+) ± ", page, re.M):
        if config in NAMES:
            found[NAMES[config]] = (float(cells[0]), float(cells[1]))
    if missing := sorted(set(NAMES.values()) - set(found)):
        raise ValueError(f"the page has no results of {', '.join(missing)}")
    return dict(sorted(found.items(), key=lambda item: item[1][1]))


def draw(results: dict[str, tuple[float, float]], path: Path) -> None:
    """Write a chart with one line per method, from its mAP without the correlations of training to that with them."""
    matplotlib.use("svg")
    from matplotlib import pyplot

    settings = {"svg.hashsalt": "digits", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 11}
    with pyplot.rc_context(settings):
        figure, axes = pyplot.subplots(figsize=(8.4, 4.6), layout="constrained")
        for row, (test, shift) in enumerate(results.values()):
            axes.plot([shift, test], [row, row], color=GRAY, linewidth=1.5, zorder=1)
            axes.scatter(test, row, color=BLUE, zorder=2, label="co-occurrences as in training" if row == 0 else None)
            axes.scatter(shift, row, color=ORANGE, zorder=2, label="without them" if row == 0 else None)
            axes.text(test + 0.6, row, f"{shift:.1f} | {test:.1f}", va="center", color=INK, fontsize=9)
        axes.set_yticks(range(len(results)), results)
        for tick in axes.get_yticklabels():
            tick.set_fontweight("bold" if tick.get_text() in ORIGIN else "normal")
        axes.set_xlim(right=101.5)
        axes.set_xlabel("mAP in percent on digits, mean of three seeds")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.legend(loc="lower right", frameon=False)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)


if __name__ == "__main__":
    draw(read_results(PAGE.read_text()), CHART)
