"""The look of all plots: one colour for each variant, figures above bars, logarithmic axes that read as numbers."""

from collections.abc import Mapping, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3")
WIDTH_INCHES = 9.0


def panels(num_rows: int, num_columns: int, height_inches: float) -> tuple[Figure, list[Axes]]:
    """A figure and its panels, row by row."""
    mpl.rc("svg", hashsalt="llm-serving")
    mpl.rc("font", size=9)
    mpl.rc("axes", titlesize=10)
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
    figure.patch.set_facecolor("white")
    axes = figure.subplots(num_rows, num_columns, squeeze=False)
    for panel in axes.flat:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
        panel.set_axisbelow(True)
    return figure, list(axes.flat)


def grouped_bars(
    panel: Axes, groups: Sequence[str], series: Mapping[str, Sequence[float]], text: str | None = "{:.3g}"
) -> None:
    """One bar for each group and series; `text` formats the value above a bar, None leaves it out."""
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        places = [group - 0.4 + width * (number + 0.5) for group in range(len(groups))]
        bars = panel.bar(places, values, width, label=name, color=COLOURS[number % len(COLOURS)])
        if text is not None:
            panel.bar_label(bars, labels=[text.format(value) for value in values], fontsize=6.5, padding=1)
    panel.set_xticks(range(len(groups)), groups)


def logarithmic(panel: Axes, bottom: float) -> None:
    """A logarithmic y axis from `bottom` on, labelled 10, 100, 1,000; once everything is drawn."""
    panel.set_yscale("log")
    panel.set_ylim(bottom, 3 * panel.get_ylim()[1])  # room for figures and a legend
    panel.yaxis.set_major_formatter("{x:,.0f}")
    panel.yaxis.set_minor_formatter("")


def legend_below(figure: Figure, panel: Axes) -> None:
    """One legend for all panels, from the labels of one."""
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
