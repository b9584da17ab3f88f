"""Figures of gradient_factors.py: factors against the probability of the label, and regions of confidence."""

import numpy as np
from matplotlib.figure import Figure

from hf_calib.plots.style import (
    BLUE,
    GREY,
    PEACH,
    SKY,
    VERMILION,
    line_looks,
    plain_axes,
)


def gradient_factor_diagram(p, panels):
    """Draw factors of the gradient against the probability of the label: BSCE-GRA's figure 1.

    Where a line is above 1 it pulls harder than cross entropy, below 0 it pushes the label down, which is hatched.

    Args:
        p: (N,) the probabilities of the label, rising, in [0, 1].
        panels: title -> {loss or gamma: (N,) factors}, as of `gradient_factors`; NaN is left out.
    """
    figure = Figure(figsize=(0.3 + 2.25 * len(panels), 3.3), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (name, lines) in zip(grid, panels.items(), strict=True):
        axes.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
        for (label, factors), look in zip(lines.items(), line_looks(), strict=False):
            axes.plot(p, factors, linewidth=1.3, label=label, **look)
        values = np.concatenate([line.get_ydata() for line in axes.lines[1:]])
        if np.nanmax(values) > 10:
            axes.set_yscale("symlog", linthresh=1, linscale=2)
        low, high = axes.get_ylim()
        if np.nanmin(values) < -1e-9:
            axes.axhspan(
                low, 0, facecolor="none", edgecolor="#BBBBBB", hatch="////", linewidth=0
            )
            axes.axhline(0, color="black", linewidth=0.8)
        else:
            low = 0
        axes.set(xlim=(0, 1), ylim=(low, high))
        axes.set_xlabel("probability of the label", fontsize=8)
        axes.set_title(name, fontsize=9)
        axes.legend(
            fontsize=7,
            frameon=False,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.2),
            ncols=2,
            handlelength=2.6,
        )
        plain_axes(axes)
    figure.axes[0].set_ylabel("gradient over cross entropy's", fontsize=8)
    return figure


def confidence_region_diagram(p, phi, regions):
    """Draw phi of each loss, and where its minimiser is over- and under-confident: dual focal loss's figure 1.

    Args:
        p: (N,) the probabilities of the top class, rising, in [0, 1].
        phi: name -> (N,) values, as `gradient_factors` of `dual_focal` with a constant rival.
        regions: the same names -> `confidence_regions`.
    """
    figure = Figure(figsize=(0.3 + 2.5 * len(phi), 2.6), layout="constrained")
    panels = figure.subplots(1, len(phi), sharey=True, squeeze=False)[0]
    for axes, (name, values) in zip(panels, phi.items(), strict=True):
        over, under = regions[name]
        axes.axvspan(
            0,
            over,
            facecolor=PEACH,
            edgecolor=VERMILION,
            hatch="////",
            linewidth=0,
            alpha=0.6,
        )
        axes.axvspan(
            under,
            1,
            facecolor=SKY,
            edgecolor=BLUE,
            hatch="....",
            linewidth=0,
            alpha=0.6,
        )
        axes.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
        axes.plot(p, values, color="black", linewidth=1.4)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        look = {
            "transform": axes.get_xaxis_transform(),
            "fontsize": 7.5,
            "ha": "center",
            "va": "bottom",
            "bbox": box,
        }
        axes.text(over / 2, 0.06, "over", rotation=90, **look)
        axes.text((under + 1) / 2, 0.06, "under", **look)
        axes.set_xlim(0, 1)
        axes.set_xticks([0, over, under, 1], ["0", f"{over:.2f}", f"{under:.2f}", "1"])
        axes.set_xlabel("probability of the top class", fontsize=8)
        axes.set_title(name, fontsize=9)
        plain_axes(axes)
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("phi", fontsize=8)
    return figure
