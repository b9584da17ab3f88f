"""AdaFocal's gammas during training: frequency of updates, limit, number of bins, lambda.

    python recipes/studies/gamma_dynamics.py

AdaFocal (Ghosh et al. 2022), figures 5, 16, 53 and 54, appendices H, I and N. The gammas are updated at the end of
each epoch, every 100, 10 and 1 steps, and by the schedule of figure 53 (each epoch, then every few steps, then each
step), which is shortened, since 100 steps are more than an epoch here. The network is a smaller global-pooling CNN on
a part of 20 Newsgroups, with one seed. It takes about 4 minutes.
"""

import time

import numpy as np
from newsgroups_cnn import load_posts, parse_options, train_with_trace
from panels import small_multiples
from records import (
    in_words,
    kind_of_intervals,
    moving_average,
    over_seeds,
    write_record,
)
from trace_figures import of_three_bins

from hf_calib.plots import gamma_dynamics, save_figure

SAMPLES = 250  # of the validation split, for updates by steps

args, settings = parse_options(__doc__, seeds=[0], rows=2000, epochs=12)
start = time.perf_counter()
schedule = {
    settings["epochs"] // 2: 100 if args.full else 10,
    settings["epochs"] * 4 // 5: 1,
}


def every(steps):
    return {
        "loss": "adafocal",
        "gamma_update_steps": steps,
        "gamma_update_samples": SAMPLES,
    }


def adafocal(**kwargs):
    return {"loss": "adafocal", "loss_kwargs": kwargs}


# The default, an update after each epoch, stands in each group, and is trained once.
default = {"every epoch": {"loss": "adafocal"}}
groups = {
    "updates": {
        "cross entropy": {"loss": "cross_entropy"},
        **default,
        "every 100 steps": every(100),
        "every 10 steps": every(10),
        "every step": every(1),
        "schedule": {
            "loss": "adafocal",
            "gamma_update_schedule": schedule,
            "gamma_update_samples": SAMPLES,
        },
    },
    "limit of gamma": {
        **default,
        "gamma max 50": adafocal(gamma_max=50.0),
        "gamma max infinite": adafocal(gamma_max="inf"),
    },
    "number of bins": {
        **default,
        "5 bins": adafocal(n_bins=5),
        "30 bins": adafocal(n_bins=30),
    },
    "lambda": {
        **default,
        "lambda 0.1": adafocal(update_rate=0.1),
        "lambda 5": adafocal(update_rate=5.0),
    },
}

runs, first = [], {}
for seed in args.seeds:
    posts, done = load_posts(args.data, settings, seed), set()
    for group, members in groups.items():
        for name, arguments in members.items():
            if name in done:
                continue
            done.add(name)
            began = time.perf_counter()
            trace, log = train_with_trace(
                posts, settings, seed=seed, n_rows=0, **arguments
            )
            held_out, gammas = trace.sets["eval"], trace.gammas
            updates = [entry for entry in log if "gamma_00" in entry]
            if seed == args.seeds[0]:
                first[name] = held_out, updates
            runs.append(
                {
                    "seed": seed,
                    "group": group,
                    "setting": name,
                    "updates": len(updates),
                    "accuracy": held_out.accuracy[-1],
                    "ece": held_out.ece.tolist(),
                    "adaptive_ece": held_out.adaptive_ece.tolist(),
                    "mean_ece_over_epochs": held_out.ece.mean(),
                    "gammas_at_the_end": [float(f"{gamma:.4g}") for gamma in gammas[-1]]
                    if gammas.size
                    else None,
                    "smallest_gamma": gammas.min() if gammas.size else None,
                    "largest_gamma": gammas.max() if gammas.size else None,
                    "seconds": round(time.perf_counter() - began, 1),
                }
            )
            print(
                f"seed {seed}  {name:<22} {len(updates):>4} updates, accuracy {held_out.accuracy[-1]:.3f}, "
                f"ECE {held_out.ece[-1]:.3f} at the end and {held_out.ece.mean():.3f} on average over the epochs",
                flush=True,
            )

# Over the seeds.
summary = {}
for name in first:
    rows = [run for run in runs if run["setting"] == name]
    summary[name] = {
        "accuracy": over_seeds([run["accuracy"] for run in rows]),
        "ece": over_seeds([run["ece"][-1] for run in rows]),
        "mean_ece_over_epochs": over_seeds(
            [run["mean_ece_over_epochs"] for run in rows]
        ),
    }


def gammas_of(updates):
    """(T, M) of the log of T updates."""
    n_bins = sum(key.startswith("gamma_") for key in updates[0])
    return np.array(
        [[entry[f"gamma_{m:02d}"] for m in range(n_bins)] for entry in updates]
    )


# Figures of the first seed.
three_bins = {
    name: of_three_bins([entry["step"] for entry in updates], gammas_of(updates))
    for name, (_, updates) in first.items()
    if updates
}
errors = {
    group: {name: (first[name][0].epochs, first[name][0].ece) for name in members}
    for group, members in groups.items()
}
smooth = {
    group: {
        name: (epochs, moving_average(ece)) for name, (epochs, ece) in lines.items()
    }
    for group, lines in errors.items()
}
figures = {
    "bins": gamma_dynamics(first["every 10 steps"][1]),
    "settings": small_multiples(
        three_bins, xlabel="step", ylabel="gamma", level=0, logarithmic=True
    ),
    "ece": small_multiples(
        smooth, faint=errors, xlabel="epoch", ylabel="ECE on validation"
    ),
}
for part, figure in figures.items():
    save_figure(figure, args.output / f"gamma_dynamics_{part}.png")

record = {
    "settings": settings,
    "seeds": args.seeds,
    "intervals": kind_of_intervals(args.seeds),
    "schedule": schedule,
    "samples_for_updates_by_steps": SAMPLES,
    "runs": runs,
    "summary": summary,
    "seconds": round(time.perf_counter() - start, 1),
}
write_record(args.output / "gamma_dynamics.json", record)

print(
    "\n| setting | accuracy | ECE at the end | ECE, mean over epochs |\n|---|---|---|---|"
)
for name, row in summary.items():
    print(f"| {name} |", " | ".join(map(in_words, row.values())), "|")
print(f"\nWritten to {args.output}/gamma_dynamics*")
