"""Figures of gradient_factors.py: factors against the probability of the label, and regions of confidence."""

import numpy as np

from hf_calib.plots.style import (
    BLUE,
    GREY,
    PEACH,
    SKY,
    VERMILION,
    drawing,
    line_looks,
    plain_axes,
)


def gradient_factor_diagram(p, panels):
    """Draw factors of the gradient against the probability of the label: BSCE-GRA's figure 1.

    Where a line is above 1 it pulls harder than cross entropy, below 0 it pushes the label down,
    which is hatched.

    Args:
        p: (N,) the probabilities of the label, rising, in [0, 1].
        panels: title -> {loss or gamma: (N,) factors}, as of `gradient_factors`; NaN is left out.
    """
    with drawing(0.3 + 2.25 * len(panels), 3.3) as figure:
        (grid,) = figure.subplots(1, len(panels), squeeze=False)
        for axes, (name, lines) in zip(grid, panels.items(), strict=True):
            axes.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
            for (label, g), look in zip(lines.items(), line_looks(), strict=False):
                axes.plot(p, g, linewidth=1.3, label=label, **look)
            values = np.concatenate(list(lines.values()))
            if np.nanmax(values) > 10:
                axes.set_yscale("symlog", linthresh=1, linscale=2)
                axes.yaxis.set_major_formatter("{x:g}")
            low, high = axes.get_ylim()
            if np.nanmin(values) < -1e-9:
                hatched = {"facecolor": "none", "edgecolor": "#BBBBBB", "hatch": "////"}
                axes.axhspan(low, 0, linewidth=0, **hatched)
                axes.axhline(0, color="black", linewidth=0.8)
            else:
                low = 0
            axes.set(xlim=(0, 1), ylim=(low, high), title=name)
            axes.set_xlabel("probability of the label")
            below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2)}
            axes.legend(ncols=2, handlelength=2.6, **below)
        plain_axes(*grid)
        grid[0].set_ylabel("gradient over cross entropy's")
    return figure


def confidence_region_diagram(p, phi, regions):
    """Draw phi of each loss, and where its minimiser is over- and under-confident: dual focal loss's figure 1.

    Args:
        p: (N,) the probabilities of the top class, rising, in [0, 1].
        phi: name -> (N,) values, as `gradient_factors` of `dual_focal` with a constant rival.
        regions: the same names -> `confidence_regions`.
    """
    over_look = {"facecolor": PEACH, "edgecolor": VERMILION, "hatch": "////"}
    under_look = {"facecolor": SKY, "edgecolor": BLUE, "hatch": "...."}
    with drawing(0.3 + 2.5 * len(phi), 2.6) as figure:
        (panels,) = figure.subplots(1, len(phi), sharey=True, squeeze=False)
        for axes, (name, values) in zip(panels, phi.items(), strict=True):
            over, under = regions[name]
            axes.axvspan(0, over, linewidth=0, alpha=0.6, **over_look)
            axes.axvspan(under, 1, linewidth=0, alpha=0.6, **under_look)
            axes.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
            axes.plot(p, values, color="black", linewidth=1.4)
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            look = {"transform": axes.get_xaxis_transform(), "fontsize": 7.5}
            look |= {"ha": "center", "va": "bottom", "bbox": box}
            axes.text(over / 2, 0.06, "over", rotation=90, **look)
            axes.text((under + 1) / 2, 0.06, "under", **look)
            ticks = [0, over, under, 1]
            axes.set_xticks(ticks, ["0", f"{over:.2f}", f"{under:.2f}", "1"])
            axes.set(xlim=(0, 1), xlabel="probability of the top class", title=name)
        plain_axes(*panels)
        panels[0].set(ylim=(0, None), ylabel="phi")
    return figure
