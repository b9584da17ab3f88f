"""Does the calibration of validation rows predict that of training rows? Both bin by bin, with gamma 0, 3, 4 and 5.

    python recipes/studies/validation_and_training.py

AdaFocal (Ghosh et al. 2022), figures 1, 2, 7 to 14 (20 Newsgroups: 14). The bins are 15 equal-mass
bins of the validation confidences. Shown are the error C_val - A_val of each bin, and the mean
probability of the label of training rows: of those in the same bin (common binning), and in 15
equal-mass bins of the training rows (independent binning). In common bins both means are between
the same edges, so they agree nearly by construction; independent bins can differ. The network is a
smaller global-pooling CNN on a part of 20 Newsgroups. It takes about 2 minutes.
"""

import numpy as np
from newsgroups_cnn import parse_options, traced_runs
from records import (
    in_words,
    kind_of_intervals,
    listed,
    means_over_seeds,
    print_table,
    write_study,
)
from trace_figures import correspondence_figure, gaps_figure, mean_of_parts

GAMMAS = (0, 3, 4, 5)

args, settings = parse_options(__doc__, seeds=[0, 1], rows=1500, epochs=10)


def correlations(ours, theirs):
    """Of each bin over the epochs; NaN where a bin was empty in half of them."""
    found = np.full(ours.shape[1], np.nan)
    for m, (a, b) in enumerate(zip(ours.T, theirs.T, strict=True)):
        both = np.isfinite(a) & np.isfinite(b)
        if 2 * both.sum() > len(a):
            found[m] = np.corrcoef(a[both], b[both])[0, 1]
    return found


def of_each_bin(held_out, own, independent):
    """What the record has of each bin, with the training rows in common and in independent bins."""
    common = own.label_probability
    return {
        "gaps_at_the_end": listed(held_out.gaps[-1]),
        "confidence_at_the_end": listed(held_out.bin_confidence[-1]),
        "training_confidence_at_the_end": listed(common[-1]),
        "correlation_over_epochs": listed(
            correlations(common, held_out.bin_confidence)
        ),
        "independent_training_confidence_at_the_end": listed(independent[-1]),
        "independent_correlation_over_epochs": listed(
            correlations(independent, held_out.bin_confidence)
        ),
        "mean_training_rows_in_bin": own.label_counts.mean(axis=0).tolist(),
    }


# Gamma 0 is cross entropy.
members = {
    gamma: {"loss": "focal", "loss_kwargs": {"gamma": float(gamma)}} for gamma in GAMMAS
}
runs = []
measured = []
first_held_out = {}
first_own = {}
for seed, gamma, trace, *_ in traced_runs(args, settings, members, n_rows=1000):
    held_out = trace.sets["eval"]
    own = trace.sets["training"]
    if seed == args.seeds[0]:
        name = "cross entropy" if gamma == 0 else f"focal {gamma}"
        first_held_out[name] = held_out
        first_own[name] = own
    rows = own.row_label_probability
    independent = np.array([mean_of_parts(row, 15) for row in rows])
    away = np.abs(independent - held_out.bin_confidence)
    # A bin that is empty at an evaluation does not count there.
    distance = np.nanmean(away, axis=1)
    run = {"seed": seed, "gamma": gamma}
    run["accuracy"] = held_out.accuracy[-1]
    run["adaptive_ece"] = held_out.adaptive_ece.tolist()
    run["training_accuracy"] = own.accuracy[-1]
    run["training_adaptive_ece"] = own.adaptive_ece[-1]
    run["independent_distance"] = distance.tolist()
    run |= of_each_bin(held_out, own, independent)
    runs.append(run)
    correlation = np.array(run["correlation_over_epochs"], dtype=float)
    of_run = {
        "accuracy": run["accuracy"],
        "adaptive_ece": run["adaptive_ece"][-1],
        "training_adaptive_ece": run["training_adaptive_ece"],
        "median_correlation": np.nanmedian(correlation),
        "independent_distance_at_first": distance[0],
        "independent_distance_at_the_end": distance[-1],
    }
    measured.append({"seed": seed, "gamma": gamma} | of_run)
    numbers = [f"{key} {number:.3f}" for key, number in of_run.items()]
    print(f"seed {seed}  gamma {gamma}: {', '.join(numbers)}", flush=True)

# Over the seeds: each gamma, and which one is the best in how many bins.
of_gamma = means_over_seeds(measured, by="gamma")
lowest = min(GAMMAS, key=lambda gamma: of_gamma[gamma]["adaptive_ece"]["value"])
sizes = []
for gamma in GAMMAS:
    gaps = [run["gaps_at_the_end"] for run in runs if run["gamma"] == gamma]
    sizes.append(np.abs(np.mean(np.array(gaps, dtype=float), axis=0)))
# A bin that is empty with a gamma is not best with it, and one that always is has no best.
of_bins = np.nan_to_num(sizes, nan=np.inf)
filled = np.isfinite(of_bins).any(axis=0)
best = [GAMMAS[k] for k in np.argmin(of_bins[:, filled], axis=0)]
n_better = sum(gamma != lowest for gamma in best)

header = ["gamma", "accuracy", "adaptive ECE", "of training rows"]
shown = ("accuracy", "adaptive_ece", "training_adaptive_ece")
rows = [
    [str(gamma), *(in_words(means[name]) for name in shown)]
    for gamma, means in of_gamma.items()
]
print_table(header, rows)
print(f"\nLowest with gamma {lowest}; another is better in {n_better} bins.")
summary = {
    "of_gamma": of_gamma,
    "lowest_adaptive_ece": lowest,
    "best_gamma_of_each_bin": best,
    "bins_where_another_gamma_is_better": n_better,
}
record = {
    "settings": settings,
    "intervals": kind_of_intervals(args.seeds),
    "runs": runs,
    "summary": summary,
}
# Of the first seed: the gap of each bin, and training next to validation rows in three bins.
figures = {
    "gaps": gaps_figure(first_held_out),
    "correspondence": correspondence_figure(first_held_out, first_own),
}
write_study("validation_and_training", args, record, figures)
