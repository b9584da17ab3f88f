"""Cost of updating AdaFocal's gammas: their share of the time of an epoch, and additional forward passes.

    python recipes/studies/overhead.py

AdaFocal (Ghosh et al. 2022), appendix J: an epoch of ResNet-50 on CIFAR-10 takes 79,123 ms, the
pass over the validation set 2,886 ms, and bins and gammas 8 ms. Here an update reuses the
predictions of an evaluation of the calibration split, so that it needs no additional pass. The
network is a smaller global-pooling CNN on a part of 20 Newsgroups. It takes half a minute.
"""

import tempfile
import time
from collections import Counter
from functools import wraps

from newsgroups_cnn import load_posts, make_trainer, parse_options
from records import kind_of_intervals, means_over_seeds, write_study

from hf_calib.plots.style import BLUE, VERMILION, drawing, plain_axes

PAPER = {
    "epoch_ms": 79_123,
    "pass_ms": 2_886,
    "table_ms": 8,
    "share": (2_886 + 8) / 79_123,
}
EVERY_10_STEPS = {"loss": "adafocal", "gamma_update_steps": 10}
EVERY_STEP = {"loss": "adafocal", "gamma_update_steps": 1}
SOME_ROWS = {"gamma_update_samples": 250}
SETTINGS = {
    "focal, fixed gamma": {"loss": "focal"},
    "every epoch, at the evaluation": {"loss": "adafocal"},
    "every epoch, a split of its own": {"loss": "adafocal", "own_split": True},
    "every 10 steps": EVERY_10_STEPS,
    "every 10 steps, 250 rows": EVERY_10_STEPS | SOME_ROWS,
    "every step, 250 rows": EVERY_STEP | SOME_ROWS,
}

args, settings = parse_options(__doc__, seeds=[0], rows=2000, epochs=3)


def measured(trainer):
    """Processor time of training steps and of updates, and the rows that go through the model without a gradient."""
    spent = Counter()
    held_out = Counter()

    def time_calls(owner, name):
        function = getattr(owner, name)

        @wraps(function)
        def timed(*args, **kwargs):
            began = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[owner] += time.process_time() - began

        setattr(owner, name, timed)

    def count_rows(module, inputs, output):
        if not module.training:
            held_out["rows"] += len(output.logits)

    callback = trainer.own_callbacks.gammas
    loss = trainer.calibration_loss
    time_calls(trainer, "training_step")
    if callback is not None:
        time_calls(callback, "update")
        time_calls(loss, "update")
    trainer.model.register_forward_hook(count_rows)
    trainer.train()

    epochs = settings["epochs"]
    updates = sum("gamma_00" in entry for entry in trainer.state.log_history)
    evaluated = epochs * len(trainer.eval_dataset)
    beyond = held_out["rows"] - evaluated
    return {
        "updates": updates,
        "epoch_seconds": spent[trainer] / epochs,
        "update_seconds": spent[callback] / epochs,
        "share_of_epoch": spent[callback] / spent[trainer],
        "table_seconds": spent[loss] / max(updates, 1),
        "held_out_rows": held_out["rows"],
        "rows_beyond_the_evaluations": beyond,
        "passes_per_epoch": beyond / evaluated,
    }


runs = []
for seed in args.seeds:
    posts = load_posts(args.data, settings, seed)
    for name, arguments in SETTINGS.items():
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(posts, settings, folder, seed=seed, **arguments)
            run = {"seed": seed, "setting": name} | measured(trainer)
        runs.append(run)
        print(run, flush=True)

means = means_over_seeds(runs, by="setting")
averaged = ("share_of_epoch", "passes_per_epoch")
summary = {
    name: {number: row[number] for number in averaged} for name, row in means.items()
}

# A point for each setting that has updates, with its number; the paper's share as a line.
shares = {name: row["share_of_epoch"] for name, row in summary.items()}
del shares["focal, fixed gamma"]
of_paper = 100 * PAPER["share"]
points = {"textcoords": "offset points", "fontsize": 8}
with drawing(6.4, 2.4) as figure:
    axes = figure.subplots()
    plain_axes(axes)
    axes.axvline(of_paper, color=VERMILION, linestyle="--", linewidth=1.2)
    place = {"xytext": (3, 2), "xycoords": ("data", "axes fraction")} | points
    axes.annotate(f"the paper's {of_paper:.1f}%", (of_paper, 1), **place)
    for row, share in enumerate(shares.values()):
        percent = 100 * share["value"]
        axes.plot(percent, row, "o", color=BLUE, markersize=6)
        if share["low"] is not None:
            ends = [100 * share["low"], 100 * share["high"]]
            axes.plot(ends, [row, row], color=BLUE, linewidth=1.2)
        place = {"xytext": (0, 6), "ha": "center"} | points
        axes.annotate(f"{percent:.3g}%", (percent, row), **place)
    axes.set_xscale("log")
    axes.margins(0.08, 0.15)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(shares)), shares, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(
        "processor time of the updates, % of an epoch's forward and backward passes"
    )

record = {
    "settings": settings,
    "intervals": kind_of_intervals(args.seeds),
    "paper": PAPER,
    "runs": runs,
    "summary": summary,
}
write_study("overhead", args, record, {"": figure})
