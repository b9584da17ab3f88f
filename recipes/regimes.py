"""Draw regimes.png: ECE before and after the temperature, and NLL after it, by the number of epochs.

    python recipes/regimes.py recipes/results

Reads results.csv of the studies NAME_N_epochs in the folder. A small point is one run, and a line
is the mean over seeds. With one seed, the marker is hollow and the line is dotted.
"""

import itertools
import re
import sys
from pathlib import Path

import numpy as np
import pandas
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

# Okabe and Ito's colours are distinguishable without red and green. Each loss also has its own
# marker and dashes.
COLOURS = (
    "#000000 #E69F00 #56B4E9 #009E73 #0072B2 #D55E00 #CC79A7 #8C6D1F #7F7F7F #5B3A8C"
)
MARKERS = "os^Dv<>PXd"
# What a panel shows, of which calibrator and metric.
PANELS = (
    ("ECE, as trained", "none", "ece"),
    ("ECE, after the temperature", "temperature", "ece"),
    (
        "NLL after the temperature,\nless cross entropy's of the seed (nats)",
        "temperature",
        "nll",
    ),
)


def main(folder: Path) -> None:
    # Task -> epochs -> results.
    studies: dict[str, dict[int, pandas.DataFrame]] = {}
    losses: dict[str, None] = {}
    for path in sorted(folder.glob("*_epochs/results.csv")):
        task, epochs = re.fullmatch(r"(.+)_(\d+)_epochs", path.parent.name).groups()
        rows = pandas.read_csv(path)
        studies.setdefault(task, {})[int(epochs)] = rows
        losses |= dict.fromkeys(rows["loss"])
    figure = Figure(figsize=(5.4 * len(studies), 11), layout="constrained")
    grid = figure.subplots(len(PANELS), len(studies), squeeze=False)
    looks = dict(zip(losses, zip(COLOURS.split(), MARKERS, strict=True), strict=False))
    for column, (task, by_epochs) in enumerate(sorted(studies.items())):
        for axes, (title, method, metric) in zip(grid[:, column], PANELS, strict=True):
            for number, (loss, look) in enumerate(looks.items()):
                values = {
                    epochs: values_of(rows, loss, method, metric)
                    for epochs, rows in sorted(by_epochs.items())
                }
                # Next to each other around the number of epochs.
                shift = 1.25 ** (number / len(looks) - 0.5)
                draw_loss(axes, values, shift, *look)
            ticks = sorted(by_epochs)
            axes.set(xscale="log", xticks=ticks, xticklabels=ticks)
            axes.set(title=task, ylabel=title, xlabel="epochs")
            axes.minorticks_off()
            if metric == "ece":
                axes.set_ylim(0, None)
            else:
                axes.axhline(0, color="black", lw=2)
    lines = [
        Line2D([], [], color=colour, marker=marker, label=loss)
        for loss, (colour, marker) in looks.items()
    ]
    figure.legend(handles=lines, loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(folder / "regimes.png", dpi=120)


def draw_loss(axes, values, shift, colour, marker) -> None:
    ends = []
    for epochs, of_seeds in values.items():
        n = len(of_seeds)
        if n == 0:
            continue
        x = epochs * shift
        ends.append((x, of_seeds.mean(), n))
        axes.plot([x] * n, of_seeds, ".", ms=3, color=colour, alpha=0.6)
    for (x, value, n), (next_x, next_value, next_n) in itertools.pairwise(ends):
        dash = ":" if 1 in (n, next_n) else "-"
        axes.plot([x, next_x], [value, next_value], dash, lw=1, color=colour)
    for x, value, n in ends:
        inside = "none" if n == 1 else colour
        axes.plot([x], [value], marker, ms=6, mec=colour, mfc=inside)


def values_of(
    rows: pandas.DataFrame, loss: str, method: str, metric: str
) -> np.ndarray:
    """One for each seed; of the NLL, the difference to cross entropy's of that seed."""
    chosen = rows[(rows["method"] == method) & (rows["metric"] == metric)]
    by_loss = chosen.pivot(index="seed", columns="loss", values="value")
    if metric == "nll":
        by_loss = by_loss.drop(columns="cross_entropy").sub(
            by_loss["cross_entropy"], axis=0
        )
    if loss not in by_loss:
        return np.array([])
    return by_loss[loss].dropna().to_numpy()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
