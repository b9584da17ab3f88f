"""Confidence over the course of training: maximum logits, the rival's probability, learned rows, ECE.

    python recipes/studies/confidence_dynamics.py

Dual focal loss (Tao et al. 2023), figure 4: ECE by epoch, its moving average with factor 0.5, maximum logits, the
probability of the label's rival. AdaFocal (Ghosh et al. 2022), figure 34 (appendix M): maximum logits of training rows
by the epoch at which they were learned. The network is a smaller global-pooling CNN on a part
of 20 Newsgroups. It takes about 3 minutes.
"""

import time

from newsgroups_cnn import load_posts, parse_options, train_with_trace
from records import (
    in_words,
    kind_of_intervals,
    moving_average,
    over_seeds,
    quartiles,
    write_record,
)
from trace_figures import confidence_figures, learned_logits

from hf_calib.plots import save_figure

LOSSES = {
    "cross entropy": "cross_entropy",
    "FLSD-53": "flsd",
    "dual focal": "dual_focal",
    "AdaFocal": "adafocal",
}

args, settings = parse_options(__doc__, seeds=[0, 1], rows=2000, epochs=12)
start = time.perf_counter()
boundaries = sorted(
    {settings["epochs"] // 4, settings["epochs"] // 3, settings["epochs"] // 2}
)


runs, first = [], {}
for seed in args.seeds:
    posts = load_posts(args.data, settings, seed)
    for name, loss in LOSSES.items():
        trace, _ = train_with_trace(posts, settings, seed=seed, n_rows=1000, loss=loss)
        held_out, own = trace.sets["eval"], trace.sets["training"]
        logits = learned_logits(own, boundaries)
        if seed == args.seeds[0]:
            first[name] = trace.sets
        runs.append(
            {
                "seed": seed,
                "loss": name,
                "accuracy": held_out.accuracy[-1],
                "ece": held_out.ece.tolist(),
                "ece_smoothed": moving_average(held_out.ece).tolist(),
                "max_logit_quartiles": quartiles(held_out.row_max_logit[-1]),
                "rival_quartiles": quartiles(held_out.row_rival_probability[-1]),
                "groups": {
                    group: {"rows": len(values), "quartiles": quartiles(values)}
                    for group, values in logits.items()
                },
            }
        )
        print(
            f"seed {seed}  {name:<14} accuracy {held_out.accuracy[-1]:.3f}, ECE {held_out.ece[-1]:.3f}, median "
            f"maximum logit {runs[-1]['max_logit_quartiles'][1]:.1f}, median rival "
            f"{runs[-1]['rival_quartiles'][1]:.3f}",
            flush=True,
        )

# Over the seeds, at the end of the training.
summary = {}
for name in LOSSES:
    rows = [run for run in runs if run["loss"] == name]
    summary[name] = {
        "accuracy": over_seeds([run["accuracy"] for run in rows]),
        "ece": over_seeds([run["ece"][-1] for run in rows]),
        "median_max_logit": over_seeds([run["max_logit_quartiles"][1] for run in rows]),
        "median_rival": over_seeds([run["rival_quartiles"][1] for run in rows]),
    }

# Figures of the first seed.
held_out, own = (
    {name: sets[key] for name, sets in first.items()} for key in ("eval", "training")
)
figures = confidence_figures(held_out, own, boundaries)
for part, figure in figures.items():
    save_figure(figure, args.output / f"confidence_dynamics_{part}.png")

record = {
    "settings": settings,
    "seeds": args.seeds,
    "intervals": kind_of_intervals(args.seeds),
    "boundaries": boundaries,
    "runs": runs,
    "summary": summary,
    "seconds": round(time.perf_counter() - start, 1),
}
write_record(args.output / "confidence_dynamics.json", record)

print(
    "\n| loss | accuracy | ECE | median maximum logit | median rival |\n|---|---|---|---|---|"
)
for name, row in summary.items():
    print(f"| {name} |", " | ".join(map(in_words, row.values())), "|")
print(f"\nWritten to {args.output}/confidence_dynamics*")
