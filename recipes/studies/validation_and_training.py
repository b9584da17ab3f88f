"""Does the calibration of validation rows predict that of training rows? Both bin by bin, with gamma 0, 3, 4 and 5.

    python recipes/studies/validation_and_training.py

AdaFocal (Ghosh et al. 2022), figures 1, 2, 7 to 14 (20 Newsgroups: 14). The bins are 15 equal-mass bins of the
validation confidences. Shown are the error C_val - A_val of each bin, and the mean probability of the label of
training rows: of those in the same bin (common binning), and in 15 equal-mass bins of the training rows (independent
binning). In common bins both means are between the same edges, so they agree nearly by construction; independent bins
can differ. The network is a smaller global-pooling CNN on a part of 20 Newsgroups. It takes about 2 minutes.
"""

import time

import numpy as np
from newsgroups_cnn import load_posts, parse_options, train_with_trace
from records import in_words, kind_of_intervals, listed, over_seeds, write_record
from trace_figures import correspondence_figure, gaps_figure, mean_of_parts

from hf_calib.plots import save_figure

GAMMAS = (0, 3, 4, 5)

args, settings = parse_options(__doc__, seeds=[0, 1], rows=1500, epochs=10)
start = time.perf_counter()


def correlations(ours, theirs):
    """Of each bin over the epochs; NaN where a bin was empty in half of them."""
    found = []
    for a, b in zip(ours.T, theirs.T, strict=True):
        both = np.isfinite(a) & np.isfinite(b)
        found.append(
            np.corrcoef(a[both], b[both])[0, 1] if 2 * both.sum() > len(a) else np.nan
        )
    return np.array(found)


runs, first = [], {}
for seed in args.seeds:
    posts = load_posts(args.data, settings, seed)
    for gamma in GAMMAS:
        trace, _ = train_with_trace(
            posts,
            settings,
            seed=seed,
            n_rows=1000,
            loss="focal",
            loss_kwargs={"gamma": float(gamma)},
        )
        held_out, own = trace.sets["eval"], trace.sets["training"]
        if seed == args.seeds[0]:
            first["cross entropy" if gamma == 0 else f"focal {gamma}"] = held_out, own
        tracked = correlations(own.label_probability, held_out.bin_confidence)
        independent = np.array(
            [mean_of_parts(row, 15) for row in own.row_label_probability]
        )
        distance = np.nanmean(np.abs(independent - held_out.bin_confidence), axis=1)
        runs.append(
            {
                "seed": seed,
                "gamma": gamma,
                "accuracy": held_out.accuracy[-1],
                "adaptive_ece": held_out.adaptive_ece.tolist(),
                "training_accuracy": own.accuracy[-1],
                "training_adaptive_ece": own.adaptive_ece[-1],
                "gaps_at_the_end": listed(held_out.gaps[-1]),
                "confidence_at_the_end": listed(held_out.bin_confidence[-1]),
                "training_confidence_at_the_end": listed(own.label_probability[-1]),
                "correlation_over_epochs": listed(tracked),
                "independent_training_confidence_at_the_end": listed(independent[-1]),
                "independent_correlation_over_epochs": listed(
                    correlations(independent, held_out.bin_confidence)
                ),
                "independent_distance": distance.tolist(),
                "mean_training_rows_in_bin": own.label_counts.mean(axis=0).tolist(),
            }
        )
        print(
            f"seed {seed}  gamma {gamma}: accuracy {held_out.accuracy[-1]:.3f}, adaptive ECE "
            f"{held_out.adaptive_ece[-1]:.3f} (training rows {own.adaptive_ece[-1]:.3f}), median correlation of "
            f"C_train and C_val over the epochs {np.nanmedian(tracked):.2f}",
            flush=True,
        )

# Over the seeds: each gamma, and which one is the best in how many bins.
of_gamma = {}
for gamma in GAMMAS:
    rows = [run for run in runs if run["gamma"] == gamma]
    medians = [
        np.nanmedian(np.array(run["correlation_over_epochs"], dtype=float))
        for run in rows
    ]
    of_gamma[gamma] = {
        "accuracy": over_seeds([run["accuracy"] for run in rows]),
        "adaptive_ece": over_seeds([run["adaptive_ece"][-1] for run in rows]),
        "training_adaptive_ece": over_seeds(
            [run["training_adaptive_ece"] for run in rows]
        ),
        "median_correlation": over_seeds(medians),
        "independent_distance_at_first": over_seeds(
            [run["independent_distance"][0] for run in rows]
        ),
        "independent_distance_at_the_end": over_seeds(
            [run["independent_distance"][-1] for run in rows]
        ),
    }
gaps = np.array(
    [[run["gaps_at_the_end"] for run in runs if run["gamma"] == g] for g in GAMMAS],
    dtype=float,
)
of_bins = np.nan_to_num(np.abs(gaps.mean(axis=1)), nan=np.inf)
best = np.argmin(of_bins[:, np.isfinite(of_bins).any(axis=0)], axis=0)
lowest = min(of_gamma, key=lambda gamma: of_gamma[gamma]["adaptive_ece"]["value"])
summary = {
    "of_gamma": of_gamma,
    "lowest_adaptive_ece": lowest,
    "best_gamma_of_each_bin": [GAMMAS[k] for k in best],
    "bins_where_another_gamma_is_better": int(sum(GAMMAS[k] != lowest for k in best)),
}

# Figures of the first seed: the gap of each bin, and training next to validation rows in three bins.
held_out, own = ({name: sets[k] for name, sets in first.items()} for k in (0, 1))
save_figure(gaps_figure(held_out), args.output / "validation_and_training_gaps.png")
save_figure(
    correspondence_figure(held_out, own),
    args.output / "validation_and_training_correspondence.png",
)

record = {
    "settings": settings,
    "seeds": args.seeds,
    "intervals": kind_of_intervals(args.seeds),
    "runs": runs,
    "summary": summary,
    "seconds": round(time.perf_counter() - start, 1),
}
write_record(args.output / "validation_and_training.json", record)

print("\n| gamma | accuracy | adaptive ECE | of training rows |\n|---|---|---|---|")
for gamma, row in of_gamma.items():
    cells = (
        in_words(row[key])
        for key in ("accuracy", "adaptive_ece", "training_adaptive_ece")
    )
    print(f"| {gamma} |", " | ".join(cells), "|")
print(
    f"\nThe lowest error with gamma {lowest}; another is better in {summary['bins_where_another_gamma_is_better']} "
    f"of {len(best)} bins. Written to {args.output}/validation_and_training*"
)
