"""Draw regimes.png: ECE before and after the temperature, and NLL after it, by the number of epochs.

    python recipes/regimes.py recipes/results

Reads results.csv of the studies NAME_N_epochs in the folder. A small point is one run, and a line is the mean over
seeds. With one seed, the marker is hollow and the line is dotted.
"""

import itertools
import re
import sys
from pathlib import Path

import numpy as np
import pandas
from matplotlib.figure import Figure

# Okabe and Ito's colours are distinguishable without red and green. Each loss also has its own marker and dashes.
COLOURS = [
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
    "#8C6D1F",
    "#7F7F7F",
    "#5B3A8C",
]
MARKERS = "os^Dv<>PXd"
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
    studies: dict[str, dict[int, pandas.DataFrame]] = {}
    for path in sorted(folder.glob("*_epochs/results.csv")):
        task, epochs = re.fullmatch(r"(.+)_(\d+)_epochs", path.parent.name).groups()
        studies.setdefault(task, {})[int(epochs)] = pandas.read_csv(path)
    losses = list(
        dict.fromkeys(
            loss
            for each in studies.values()
            for rows in each.values()
            for loss in rows["loss"]
        )
    )
    figure = Figure(figsize=(5.4 * len(studies), 11), layout="constrained")
    grid = figure.subplots(len(PANELS), len(studies), squeeze=False)
    for column, (task, by_epochs) in enumerate(sorted(studies.items())):
        for axes, (title, method, metric) in zip(grid[:, column], PANELS, strict=True):
            for number, loss in enumerate(losses):
                draw_loss(
                    axes,
                    by_epochs,
                    (loss, method, metric),
                    number / len(losses) - 0.5,
                    number,
                )
            axes.set(
                xscale="log",
                xticks=sorted(by_epochs),
                xticklabels=sorted(by_epochs),
                title=task,
            )
            axes.set(ylabel=title, xlabel="epochs")
            axes.minorticks_off()
            if metric == "ece":
                axes.set_ylim(0, None)
            else:
                axes.axhline(0, color=COLOURS[0], lw=2)
    lines = [
        figure.axes[0].plot([], [], color=COLOURS[i], marker=MARKERS[i], label=loss)[0]
        for i, loss in enumerate(losses)
    ]
    figure.legend(handles=lines, loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(folder / "regimes.png", dpi=120)


def draw_loss(axes, by_epochs, key, shift, number) -> None:
    means = {}
    for epochs, rows in sorted(by_epochs.items()):
        values = values_of(rows, *key)
        if len(values):
            x = epochs * 1.25**shift
            means[x] = (values.mean(), len(values))
            axes.plot(
                [x] * len(values), values, ".", ms=3, color=COLOURS[number], alpha=0.6
            )
    ends = list(means.items())
    for (x, (value, n)), (other_x, (other, m)) in itertools.pairwise(ends):
        axes.plot(
            [x, other_x],
            [value, other],
            ":" if min(n, m) == 1 else "-",
            lw=1,
            color=COLOURS[number],
        )
    for x, (value, n) in ends:
        face = "none" if n == 1 else COLOURS[number]
        axes.plot([x], [value], MARKERS[number], ms=6, mec=COLOURS[number], mfc=face)


def values_of(
    rows: pandas.DataFrame, loss: str, method: str, metric: str
) -> np.ndarray:
    """One for each seed; of the NLL, the difference to cross entropy's of that seed."""
    chosen = rows[(rows["method"] == method) & (rows["metric"] == metric)].pivot(
        index="seed", columns="loss", values="value"
    )
    if loss not in chosen or (metric == "nll" and loss == "cross_entropy"):
        return np.array([])
    values = chosen[loss] - chosen["cross_entropy"] if metric == "nll" else chosen[loss]
    return values.dropna().to_numpy()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
