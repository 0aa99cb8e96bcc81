"""The plot of a sweep: step and scaling efficiency over the number of workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nestpipe.files import whole
from nestpipe.simulate.sweep import Prediction, efficiencies

COLOURS = ("#7f7f7f", "#e07b29", "#3a9a4f", "#2f6fb4", "#8e5ea2", "#c0392b")


def draw(predictions: Sequence[Prediction], path: Path, *, title: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

    figure = Figure(figsize=(13, 5), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left", wrap=True)
    left, right = figure.subplots(1, 2)
    scaling = efficiencies(predictions)
    counts = sorted({prediction.workers for prediction in predictions})
    for number, name in enumerate(dict.fromkeys(prediction.setting for prediction in predictions)):
        mine = sorted(
            (prediction.workers, prediction.step, e)
            for prediction, e in zip(predictions, scaling, strict=True)
            if prediction.setting == name
        )
        x, steps, efficiency = zip(*mine, strict=True)
        colour = COLOURS[number % len(COLOURS)]
        left.plot(x, steps, marker="o", color=colour, label=name)
        right.plot(x, efficiency, marker="o", color=colour, label=name)
    for panel, what in ((left, "step, ms (simulated)"), (right, "scaling efficiency (simulated)")):
        panel.set_xscale("log", base=2)
        panel.xaxis.set_minor_locator(NullLocator())
        panel.set_xticks(counts, [f"{count:,}" for count in counts])
        panel.set_xlabel("workers")
        panel.set_ylabel(what)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    right.yaxis.set_major_formatter(PercentFormatter(1.0))
    left.legend(frameon=False, fontsize=9)
    with whole(path) as partial:
        figure.savefig(partial, format="png")
