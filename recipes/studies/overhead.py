"""Cost of updating AdaFocal's gammas: their share of the time of an epoch, and additional forward passes.

    python recipes/studies/overhead.py

AdaFocal (Ghosh et al. 2022), appendix J: an epoch of ResNet-50 on CIFAR-10 takes 79,123 ms, the pass over the
validation set 2,886 ms, and bins and gammas 8 ms. Here an update reuses the predictions of an evaluation of the
calibration split, so that it needs no additional pass. The network is a smaller global-pooling CNN on a part of 20
Newsgroups. It takes half a minute.
"""

import tempfile
import time
from functools import wraps

from matplotlib.figure import Figure
from newsgroups_cnn import load_posts, make_trainer, parse_options
from records import kind_of_intervals, over_seeds, write_record

from hf_calib.plots import save_figure

PAPER = {
    "epoch_ms": 79_123,
    "pass_ms": 2_886,
    "table_ms": 8,
    "share": (2_886 + 8) / 79_123,
}
SETTINGS = {
    "focal, fixed gamma": {"loss": "focal"},
    "every epoch, at the evaluation": {"loss": "adafocal"},
    "every epoch, a split of its own": {"loss": "adafocal", "own_split": True},
    "every 10 steps": {"loss": "adafocal", "gamma_update_steps": 10},
    "every 10 steps, 250 rows": {
        "loss": "adafocal",
        "gamma_update_steps": 10,
        "gamma_update_samples": 250,
    },
    "every step, 250 rows": {
        "loss": "adafocal",
        "gamma_update_steps": 1,
        "gamma_update_samples": 250,
    },
}

args, settings = parse_options(__doc__, seeds=[0], rows=2000, epochs=3)
start = time.perf_counter()


def measured(trainer):
    """Processor time of training steps and of updates, and the rows that go through the model without a gradient."""
    spent = {"update": 0.0, "table": 0.0, "step": 0.0}
    held_out_rows = 0

    def timed(name, function):
        @wraps(function)
        def call(*args, **kwargs):
            began = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += time.process_time() - began

        return call

    def count(module, inputs, output):
        nonlocal held_out_rows
        if not module.training:
            held_out_rows += len(output.logits)

    callback = trainer.own_callbacks.gammas
    if callback is not None:
        callback.update = timed("update", callback.update)
    trainer.training_step = timed("step", trainer.training_step)
    if hasattr(trainer.calibration_loss, "update"):
        trainer.calibration_loss.update = timed(
            "table", trainer.calibration_loss.update
        )
    trainer.model.register_forward_hook(count)
    trainer.train()

    updates = sum("gamma_00" in entry for entry in trainer.state.log_history)
    evaluated = settings["epochs"] * len(trainer.eval_dataset)
    return {
        "updates": updates,
        "epoch_seconds": spent["step"] / settings["epochs"],
        "update_seconds": spent["update"] / settings["epochs"],
        "share_of_epoch": spent["update"] / spent["step"],
        "table_seconds": spent["table"] / max(updates, 1),
        "held_out_rows": held_out_rows,
        "rows_beyond_the_evaluations": held_out_rows - evaluated,
        "passes_per_epoch": (held_out_rows - evaluated) / evaluated,
    }


runs = []
for seed in args.seeds:
    posts = load_posts(args.data, settings, seed)
    for name, arguments in SETTINGS.items():
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(posts, settings, folder, seed=seed, **arguments)
            run = {"seed": seed, "setting": name, **measured(trainer)}
        runs.append(run)
        print(
            f"{name:<34} epoch {run['epoch_seconds']:6.2f} s, updates {run['update_seconds']:6.3f} s an epoch "
            f"({100 * run['share_of_epoch']:5.2f}%), of it bins and gammas {1000 * run['table_seconds']:.2f} ms an "
            f"update; {run['passes_per_epoch']:.2f} passes over held-out rows per epoch beyond the evaluations",
            flush=True,
        )

summary = {}
for name in SETTINGS:
    rows = [run for run in runs if run["setting"] == name]
    summary[name] = {
        "share_of_epoch": over_seeds([run["share_of_epoch"] for run in rows]),
        "passes_per_epoch": over_seeds([run["passes_per_epoch"] for run in rows]),
    }
record = {
    "settings": settings,
    "seeds": args.seeds,
    "intervals": kind_of_intervals(args.seeds),
    "paper": PAPER,
    "runs": runs,
    "summary": summary,
    "seconds": round(time.perf_counter() - start, 1),
}

# Figure: a point for each setting that has updates, with its number; the paper's share as a line.
shares = {
    name: row["share_of_epoch"]
    for name, row in summary.items()
    if name != "focal, fixed gamma"
}
figure = Figure(figsize=(6.4, 2.4), layout="constrained")
axes = figure.subplots()
axes.axvline(100 * PAPER["share"], color="#D55E00", linestyle="--", linewidth=1.2)
axes.annotate(
    f"the paper's {100 * PAPER['share']:.1f}%",
    (100 * PAPER["share"], 1),
    (3, 2),
    xycoords=("data", "axes fraction"),
    textcoords="offset points",
    fontsize=8,
)
for place, share in enumerate(shares.values()):
    percent = 100 * share["value"]
    axes.plot(percent, place, "o", color="#0072B2", markersize=6)
    if share["low"] is not None:
        axes.plot(
            [100 * share["low"], 100 * share["high"]],
            [place, place],
            color="#0072B2",
            linewidth=1.2,
        )
    axes.annotate(
        f"{percent:.3g}%",
        (percent, place),
        (0, 6),
        textcoords="offset points",
        ha="center",
        fontsize=8,
    )
axes.set_xscale("log")
axes.margins(0.08, 0.15)
axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
axes.set_axisbelow(True)
axes.xaxis.set_major_formatter("{x:g}")
axes.set_yticks(range(len(shares)), shares, fontsize=8)
axes.invert_yaxis()
axes.set_xlabel(
    "processor time of the updates, % of an epoch's forward and backward passes",
    fontsize=8,
)
axes.tick_params(axis="x", labelsize=7)
axes.spines[["top", "right"]].set_visible(False)
save_figure(figure, args.output / "overhead.png")

write_record(args.output / "overhead.json", record)
print(f"Written to {args.output}/overhead.*, {record['seconds']:.0f} s")
