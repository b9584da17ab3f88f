"""Figures of the dynamics of your own runs, recorded with `training_trace: true`.

    python recipes/studies/traced_trainings.py outputs/cross_entropy outputs/adafocal --output figures

Each folder is the `output_dir` of a run, and its name is the name in the figures. The figures are those of AdaFocal
(Ghosh et al. 2022, figures 1, 2, 5, 34) and of dual focal loss (Tao et al. 2023, figure 4): the ECE by epoch (of the
validation rows and, as in the papers, of the test rows), the gap of each bin, training and validation rows in common
bins, maximum logits, the probability of the rival, the epoch at which rows are learned, and the gammas of an adaptive
loss. It takes seconds. `traced_resnet.sh` trains a ResNet-20 as an example.
"""

import argparse
import time
from pathlib import Path

import numpy as np
from options import output_folder
from panels import small_multiples
from papers.dynamics import Trace
from records import listed, quartiles, write_record
from trace_figures import (
    confidence_figures,
    correspondence_figure,
    gaps_figure,
    learned_logits,
    of_three_bins,
)

from hf_calib.plots import save_figure

parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
)
parser.add_argument(
    "trainings", type=Path, nargs="+", help="Folders with training_trace.json."
)
parser.add_argument("--output", type=output_folder, default="outputs/studies")
parser.add_argument(
    "--set", help="The evaluation set, where there are several, such as eval_matched."
)
args = parser.parse_args()
start = time.perf_counter()
names = [folder.resolve().name for folder in args.trainings]
if len(set(names)) < len(names):
    parser.error(
        f"argument trainings: expected folders of different names, got {' '.join(names)}"
    )


def read(folder):
    """The trace, and the evaluation set to look at."""
    try:
        trace = Trace.load(folder)
    except ValueError as error:
        parser.error(str(error))
    sets = [name for name in trace.sets if name not in ("training", "test")]
    chosen = args.set or (sets[0] if len(sets) == 1 else None)
    if chosen not in sets:
        parser.error(
            f"argument --set: expected one of the evaluation sets of {folder} ({' '.join(sets)})"
        )
    return trace, trace.sets[chosen]


read_all = {
    name: read(folder) for name, folder in zip(names, args.trainings, strict=True)
}
traces = {name: trace for name, (trace, _) in read_all.items()}
held_out = {name: traced for name, (_, traced) in read_all.items()}
own, tested = (
    {name: trace.sets[rows] for name, trace in traces.items() if rows in trace.sets}
    for rows in ("training", "test")
)
for name, traced in (*held_out.items(), *own.items()):
    if not traced.rows.size or np.isnan(traced.row_confidence).any():
        parser.error(
            f"argument trainings: expected rows that {name} follows through all evaluations, got none; "
            "train without a change of the evaluation set, with n_kept_rows above 0"
        )
if len({traced.gaps.shape[1] for traced in held_out.values()}) > 1:
    parser.error("argument trainings: expected trainings with the same number of bins")


# Thirds of the shortest training, by which rows are grouped.
last = min(traced.epochs[-1] for traced in held_out.values())
boundaries = sorted({float(f"{last * part / 3:.3g}") for part in (1, 2)})
figures = confidence_figures(held_out, own, boundaries, tested) | {
    "gaps": gaps_figure(held_out)
}
if own:
    figures["correspondence"] = correspondence_figure(held_out, own)
gammas = {
    name: of_three_bins(trace.steps, trace.gammas)
    for name, trace in traces.items()
    if trace.gammas.size
}
if gammas:
    figures["gammas"] = small_multiples(gammas, xlabel="step", ylabel="gamma", level=0)
for part, figure in figures.items():
    save_figure(figure, args.output / f"traced_trainings_{part}.png")


def over_confidence(traced):
    """(T,) of all rows."""
    return np.nansum(traced.gaps * traced.counts, axis=1) / traced.n


record = {
    "settings": {"boundaries": boundaries},
    "seeds": [],
    "trainings": [
        {
            "name": name,
            "loss": traces[name].loss,
            "epochs": listed(traced.epochs),
            "accuracy": listed(traced.accuracy),
            "ece": listed(traced.ece),
            "adaptive_ece": listed(traced.adaptive_ece),
            "confidence_minus_accuracy": listed(over_confidence(traced)),
            "gaps_at_the_end": listed(traced.gaps[-1]),
            "test_rows": {
                "n": int(tested[name].n[-1]),
                "accuracy": listed(tested[name].accuracy),
                "ece": listed(tested[name].ece),
                "adaptive_ece": listed(tested[name].adaptive_ece),
            }
            if name in tested
            else None,
            "max_logit_quartiles": quartiles(traced.row_max_logit[-1]),
            "rival_quartiles": quartiles(traced.row_rival_probability[-1]),
            "gammas": {
                place: listed(values) for place, (_, values) in gammas[name].items()
            }
            if name in gammas
            else None,
            "training_rows": {
                "n": int(own[name].n[-1]),
                "accuracy": listed(own[name].accuracy),
                "ece": listed(own[name].ece),
                "confidence_minus_accuracy": listed(over_confidence(own[name])),
                "max_logit_quartiles_by_learned_epoch": {
                    group: {"rows": len(logits), "quartiles": quartiles(logits)}
                    for group, logits in learned_logits(own[name], boundaries).items()
                },
            }
            if name in own
            else None,
        }
        for name, traced in held_out.items()
    ],
    "seconds": round(time.perf_counter() - start, 1),
}
write_record(args.output / "traced_trainings.json", record)

print(
    "| training | loss | accuracy | ECE | least ECE, at epoch | ECE of training rows | of test rows |\n"
    "|---|---|---|---|---|---|---|"
)
for row in record["trainings"]:
    best = int(np.argmin(row["ece"]))
    trained, of_test = (
        f"{row[rows]['ece'][-1]:.3f}" if row[rows] else ""
        for rows in ("training_rows", "test_rows")
    )
    print(
        f"| {row['name']} | {row['loss']} | {row['accuracy'][-1]:.3f} | {row['ece'][-1]:.3f} "
        f"| {row['ece'][best]:.3f}, {row['epochs'][best]:g} | {trained} | {of_test} |"
    )
print(f"Written to {args.output}/traced_trainings*")
