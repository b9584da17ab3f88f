"""Figures of recorded runs, shared by several studies: the `TrainingTrace` of each run, by its name."""

import numpy as np
from panels import group_boxes, small_multiples, spread_by_epoch
from papers.dynamics import learned_epoch, learned_groups
from records import moving_average, quartiles


def mean_of_parts(values, n_bins):
    """(n_bins,) means of equal-mass bins of the values' own."""
    parts = np.array_split(np.sort(values), n_bins)
    return np.array([part.mean() if len(part) else np.nan for part in parts])


def learned_logits(own, boundaries):
    """The maximum logits of training rows at the end, by the epoch at which they were learned."""
    learned = learned_epoch(own.epochs, own.row_correct)
    groups = learned_groups(learned, boundaries)
    return {group: own.row_max_logit[-1][mask] for group, mask in groups.items()}


def learned_quartiles(own, boundaries):
    """How many rows each group has, and the quartiles of their maximum logits."""
    return {
        group: {"rows": len(logits), "quartiles": quartiles(logits)}
        for group, logits in learned_logits(own, boundaries).items()
    }


def of_three_bins(steps, gammas):
    """The gammas (T, M) of the lowest, the middle and the highest bin by step (T,), as lines of a figure."""
    n_bins = gammas.shape[1]
    return {
        "lowest bin": (steps, gammas[:, 0]),
        "middle bin": (steps, gammas[:, n_bins // 2]),
        "highest bin": (steps, gammas[:, -1]),
    }


def lines_of(traced_sets, numbers):
    """The numbers of each run by epoch, as lines of a figure."""
    return {
        name: (traced.epochs, getattr(traced, numbers))
        for name, traced in traced_sets.items()
    }


def error_figure(panels, ylabel="ECE"):
    """The ECE by epoch, smoothed, before its values; panel -> name -> TracedSet."""
    errors = {title: lines_of(found, "ece") for title, found in panels.items()}
    smooth = {}
    for title, lines in errors.items():
        smooth[title] = {
            name: (epochs, moving_average(ece)) for name, (epochs, ece) in lines.items()
        }
    return small_multiples(smooth, faint=errors, xlabel="epoch", ylabel=ylabel)


def confidence_figures(held_out, own, boundaries, tested=None):
    """Dual focal loss's figure 4 and AdaFocal's figure 34: ECE, maximum logits and rivals by epoch, learned rows.

    Args:
        held_out: name -> the validation's TracedSet.
        own: name -> that of the training rows; may be empty.
        boundaries: epochs that part the learned rows.
        tested: name -> that of the test rows, which the papers' figures of the ECE show.
    """
    of_errors = {"validation rows": held_out}
    if tested:
        of_errors["test rows"] = tested
    sets = {"validation rows": held_out}
    if own:
        sets["training rows"] = own

    def spread(numbers, ylabel):
        panels = {title: lines_of(found, numbers) for title, found in sets.items()}
        return spread_by_epoch(panels, ylabel=ylabel)

    figures = {
        "ece": error_figure(of_errors),
        "max_logit": spread("row_max_logit", "maximum logit"),
        "rival": spread("row_rival_probability", "probability of the label's rival"),
    }
    if own:
        figures["learned"] = group_boxes(
            {name: learned_logits(traced, boundaries) for name, traced in own.items()},
            xlabel="maximum logit at the end, training rows",
            ylabel="learned at epoch",
        )
    return figures


def number_of_bins(traced_sets):
    return next(iter(traced_sets.values())).gaps.shape[1]


def gaps_figure(held_out):
    """AdaFocal's figure 2: the gap of each bin of the validation by epoch."""
    gaps = lines_of(held_out, "gaps")
    panels = {}
    for m in range(number_of_bins(held_out)):
        panels[f"bin {m}"] = {
            name: (epochs, of_bins[:, m]) for name, (epochs, of_bins) in gaps.items()
        }
    ylabel = "confidence - accuracy on validation"
    return small_multiples(panels, xlabel="epoch", ylabel=ylabel, level=0)


def correspondence_figure(held_out, own):
    """AdaFocal's figures 1, 7 and 9: training next to validation rows in the lowest, the middle and the highest bin."""
    n_bins = number_of_bins(held_out)
    panels = {}
    for m in sorted({0, n_bins // 2, n_bins - 1}):
        for name, trained in own.items():
            evaluated = held_out[name]
            independent = [
                mean_of_parts(row, n_bins)[m] for row in trained.row_label_probability
            ]
            accuracy = evaluated.epochs, evaluated.bin_accuracy[:, m]
            panels[f"{name}, bin {m}"] = {
                "training rows": (trained.epochs, trained.label_probability[:, m]),
                "training rows, bins of their own": (trained.epochs, independent),
                "validation rows": (evaluated.epochs, evaluated.bin_confidence[:, m]),
                "accuracy on validation": accuracy,
            }
    return small_multiples(
        panels,
        xlabel="epoch",
        ylabel="mean in the validation's bin",
        columns=min(len(own), 5),
    )
