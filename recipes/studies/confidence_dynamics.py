"""Confidence over the course of training: maximum logits, the rival's probability, learned rows, ECE.

    python recipes/studies/confidence_dynamics.py

Dual focal loss (Tao et al. 2023), figure 4: ECE by epoch, its moving average with factor 0.5,
maximum logits, the probability of the label's rival. AdaFocal (Ghosh et al. 2022), figure 34
(appendix M): maximum logits of training rows by the epoch at which they were learned. The network
is a smaller global-pooling CNN on a part of 20 Newsgroups. It takes about 3 minutes.
"""

from newsgroups_cnn import parse_options, traced_runs
from records import (
    kind_of_intervals,
    means_over_seeds,
    moving_average,
    print_means,
    quartiles,
    write_study,
)
from trace_figures import confidence_figures, learned_quartiles

LOSSES = {
    "cross entropy": "cross_entropy",
    "FLSD-53": "flsd",
    "dual focal": "dual_focal",
    "AdaFocal": "adafocal",
}

args, settings = parse_options(__doc__, seeds=[0, 1], rows=2000, epochs=12)
epochs = settings["epochs"]
boundaries = sorted({epochs // 4, epochs // 3, epochs // 2})

runs = []
at_the_end = []
first_held_out = {}
first_own = {}
members = {name: {"loss": loss} for name, loss in LOSSES.items()}
for seed, name, trace, *_ in traced_runs(args, settings, members, n_rows=1000):
    held_out = trace.sets["eval"]
    own = trace.sets["training"]
    if seed == args.seeds[0]:
        first_held_out[name] = held_out
        first_own[name] = own
    run = {"seed": seed, "loss": name}
    run["accuracy"] = held_out.accuracy[-1]
    run["ece"] = held_out.ece.tolist()
    run["ece_smoothed"] = moving_average(held_out.ece).tolist()
    run["max_logit_quartiles"] = quartiles(held_out.row_max_logit[-1])
    run["rival_quartiles"] = quartiles(held_out.row_rival_probability[-1])
    run["groups"] = learned_quartiles(own, boundaries)
    runs.append(run)
    of_run = {
        "accuracy": run["accuracy"],
        "ece": run["ece"][-1],
        "median_max_logit": run["max_logit_quartiles"][1],
        "median_rival": run["rival_quartiles"][1],
    }
    at_the_end.append({"seed": seed, "loss": name} | of_run)
    numbers = [f"{key} {number:.3f}" for key, number in of_run.items()]
    print(f"seed {seed}  {name:<14} {', '.join(numbers)}", flush=True)

summary = means_over_seeds(at_the_end, by="loss")
header = ["loss", "accuracy", "ECE", "median maximum logit", "median rival"]
print_means(header, summary)
record = {
    "settings": settings,
    "intervals": kind_of_intervals(args.seeds),
    "boundaries": boundaries,
    "runs": runs,
    "summary": summary,
}
# Of the first seed.
figures = confidence_figures(first_held_out, first_own, boundaries)
write_study("confidence_dynamics", args, record, figures)
