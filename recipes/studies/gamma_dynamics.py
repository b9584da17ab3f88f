"""AdaFocal's gammas during training: frequency of updates, limit, number of bins, lambda.

    python recipes/studies/gamma_dynamics.py

AdaFocal (Ghosh et al. 2022), figures 5, 16, 53 and 54, appendices H, I and N. The gammas are
updated at the end of each epoch, every 100, 10 and 1 steps, and by the schedule of figure 53 (each
epoch, then every few steps, then each step), which is shortened, since 100 steps are more than an
epoch here. The network is a smaller global-pooling CNN on a part of 20 Newsgroups, with one seed.
It takes about 4 minutes.
"""

import numpy as np
from newsgroups_cnn import parse_options, traced_runs
from panels import small_multiples
from records import (
    kind_of_intervals,
    listed,
    means_over_seeds,
    print_means,
    write_study,
)
from trace_figures import error_figure, of_three_bins

from hf_calib.plots import gamma_dynamics

# Of the validation split, for updates by steps.
SAMPLES = 250

args, settings = parse_options(__doc__, seeds=[0], rows=2000, epochs=12)
half = settings["epochs"] // 2
last_fifth = settings["epochs"] * 4 // 5
schedule = {half: 100 if args.full else 10, last_fifth: 1}


def adafocal(**kwargs):
    return {"loss": "adafocal", "loss_kwargs": kwargs}


def by_steps(**updates):
    return {"loss": "adafocal", "gamma_update_samples": SAMPLES, **updates}


# The default, an update after each epoch, stands in each group, and is trained once.
default = {"every epoch": adafocal()}
groups = {
    "updates": {
        "cross entropy": {"loss": "cross_entropy"},
        **default,
        "every 100 steps": by_steps(gamma_update_steps=100),
        "every 10 steps": by_steps(gamma_update_steps=10),
        "every step": by_steps(gamma_update_steps=1),
        "schedule": by_steps(gamma_update_schedule=schedule),
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
members = {}
group_of = {}
for group, of_group in groups.items():
    members |= of_group
    for name in of_group:
        group_of.setdefault(name, group)


def gammas_of(updates):
    """(T, M) of the log of T updates."""
    names = sorted(key for key in updates[0] if key.startswith("gamma_"))
    return np.array([[entry[name] for name in names] for entry in updates])


runs = []
measured = []
held_out_of_first = {}
updates_of_first = {}
for seed, name, trace, log, seconds in traced_runs(args, settings, members, n_rows=0):
    held_out = trace.sets["eval"]
    updates = [entry for entry in log if "gamma_00" in entry]
    if seed == args.seeds[0]:
        held_out_of_first[name] = held_out
        updates_of_first[name] = updates
    of_run = {
        "accuracy": held_out.accuracy[-1],
        "ece": held_out.ece[-1],
        "mean_ece_over_epochs": held_out.ece.mean(),
    }
    measured.append({"seed": seed, "setting": name} | of_run)
    run = {"seed": seed, "group": group_of[name], "setting": name}
    run |= of_run | {"ece": held_out.ece.tolist()}
    run["adaptive_ece"] = held_out.adaptive_ece.tolist()
    run["updates"] = len(updates)
    run["seconds"] = seconds
    # Cross entropy has no gammas.
    run |= dict.fromkeys(("gammas_at_the_end", "smallest_gamma", "largest_gamma"))
    if trace.gammas.size:
        run["gammas_at_the_end"] = listed(trace.gammas[-1])
        run["smallest_gamma"] = trace.gammas.min()
        run["largest_gamma"] = trace.gammas.max()
    runs.append(run)
    numbers = [f"{key} {number:.3f}" for key, number in of_run.items()]
    updated = f"{len(updates):>4} updates"
    print(f"seed {seed}  {name:<22} {updated}, {', '.join(numbers)}", flush=True)

summary = means_over_seeds(measured, by="setting")
header = ["setting", "accuracy", "ECE at the end", "ECE, mean over epochs"]
print_means(header, summary)

# Figures of the first seed.
three_bins = {}
for name, updates in updates_of_first.items():
    if updates:
        steps = [entry["step"] for entry in updates]
        three_bins[name] = of_three_bins(steps, gammas_of(updates))
errors = {
    group: {name: held_out_of_first[name] for name in of_group}
    for group, of_group in groups.items()
}
figures = {
    "bins": gamma_dynamics(updates_of_first["every 10 steps"]),
    "settings": small_multiples(
        three_bins, xlabel="step", ylabel="gamma", level=0, logarithmic=True
    ),
    "ece": error_figure(errors, ylabel="ECE on validation"),
}
record = {
    "settings": settings,
    "intervals": kind_of_intervals(args.seeds),
    "schedule": schedule,
    "samples_for_updates_by_steps": SAMPLES,
    "runs": runs,
    "summary": summary,
}
write_study("gamma_dynamics", args, record, figures)
