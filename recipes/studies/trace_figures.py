"""Figures of recorded runs, shared by several studies: the `TrainingTrace` of each run, by its name."""

import numpy as np
from panels import group_boxes, small_multiples, spread_by_epoch
from papers.dynamics import learned_epoch, learned_groups
from records import moving_average


def mean_of_parts(values, n_bins):
    """(n_bins,) means of equal-mass bins of the values' own."""
    parts = np.array_split(np.sort(values), n_bins)
    return np.array([part.mean() if len(part) else np.nan for part in parts])


def learned_logits(own, boundaries):
    """The maximum logits of training rows at the end, by the epoch at which they were learned."""
    groups = learned_groups(learned_epoch(own.epochs, own.row_correct), boundaries)
    return {group: own.row_max_logit[-1][mask] for group, mask in groups.items()}


def of_three_bins(steps, gammas):
    """The gammas (T, M) of the lowest, the middle and the highest bin by step (T,), as lines of a figure."""
    last = gammas.shape[1] - 1
    places = {"lowest bin": 0, "middle bin": (last + 1) // 2, "highest bin": last}
    return {name: (steps, gammas[:, m]) for name, m in places.items()}


def confidence_figures(held_out, own, boundaries, tested=None):
    """Dual focal loss's figure 4 and AdaFocal's figure 34: ECE, maximum logits and rivals by epoch, learned rows.

    Args:
        held_out: name -> the validation's TracedSet.
        own: name -> that of the training rows; may be empty.
        boundaries: epochs that part the learned rows.
        tested: name -> that of the test rows, which the papers' figures of the ECE show.
    """
    of_errors = {"validation rows": held_out} | (
        {"test rows": tested} if tested else {}
    )
    error = {
        title: {name: (traced.epochs, traced.ece) for name, traced in found.items()}
        for title, found in of_errors.items()
    }
    smooth = {
        title: {
            name: (epochs, moving_average(ece)) for name, (epochs, ece) in found.items()
        }
        for title, found in error.items()
    }
    sets = {"validation rows": held_out} | ({"training rows": own} if own else {})
    logits, rivals = (
        {
            title: {
                name: (traced.epochs, getattr(traced, values))
                for name, traced in found.items()
            }
            for title, found in sets.items()
        }
        for values in ("row_max_logit", "row_rival_probability")
    )
    figures = {
        "ece": small_multiples(
            smooth,
            faint=error,
            xlabel="epoch",
            ylabel="ECE",
        ),
        "max_logit": spread_by_epoch(logits, ylabel="maximum logit"),
        "rival": spread_by_epoch(rivals, ylabel="probability of the label's rival"),
    }
    if own:
        figures["learned"] = group_boxes(
            {name: learned_logits(traced, boundaries) for name, traced in own.items()},
            xlabel="maximum logit at the end, training rows",
            ylabel="learned at epoch",
        )
    return figures


def gaps_figure(held_out):
    """AdaFocal's figure 2: the gap of each bin of the validation by epoch."""
    n_bins = next(iter(held_out.values())).gaps.shape[1]
    panels = {
        f"bin {m}": {
            name: (traced.epochs, traced.gaps[:, m])
            for name, traced in held_out.items()
        }
        for m in range(n_bins)
    }
    return small_multiples(
        panels, xlabel="epoch", ylabel="confidence - accuracy on validation", level=0
    )


def correspondence_figure(held_out, own):
    """AdaFocal's figures 1, 7 and 9: training next to validation rows in the lowest, the middle and the highest bin."""
    n_bins = next(iter(held_out.values())).gaps.shape[1]
    panels = {
        f"{name}, bin {m}": {
            "training rows": (trained.epochs, trained.label_probability[:, m]),
            "training rows, bins of their own": (
                trained.epochs,
                [
                    mean_of_parts(row, n_bins)[m]
                    for row in trained.row_label_probability
                ],
            ),
            "validation rows": (
                held_out[name].epochs,
                held_out[name].bin_confidence[:, m],
            ),
            "accuracy on validation": (
                held_out[name].epochs,
                held_out[name].bin_accuracy[:, m],
            ),
        }
        for m in sorted({0, n_bins // 2, n_bins - 1})
        for name, trained in own.items()
    }
    return small_multiples(
        panels,
        xlabel="epoch",
        ylabel="mean in the validation's bin",
        columns=min(len(own), 5),
    )
