"""Figures of the dynamics of your own runs, recorded with `training_trace: true`.

    python recipes/studies/traced_trainings.py outputs/cross_entropy outputs/adafocal --output figures

Each folder is the `output_dir` of a run, and its name is the name in the figures. The figures are
those of AdaFocal (Ghosh et al. 2022, figures 1, 2, 5, 34) and of dual focal loss (Tao et al. 2023,
figure 4): the ECE by epoch (of the validation rows and, as in the papers, of the test rows), the
gap of each bin, training and validation rows in common bins, maximum logits, the probability of the
rival, the epoch at which rows are learned, and the gammas of an adaptive loss. It takes seconds.
`traced_resnet.sh` trains a ResNet-20 as an example.
"""

from pathlib import Path

import numpy as np
from options import parse, study_parser
from panels import small_multiples
from papers.dynamics import Trace
from records import listed, print_table, quartiles, write_study
from trace_figures import (
    confidence_figures,
    correspondence_figure,
    gaps_figure,
    learned_quartiles,
    number_of_bins,
    of_three_bins,
)

parser = study_parser(__doc__)
folders_help = "Folders with training_trace.json."
parser.add_argument("trainings", type=Path, nargs="+", help=folders_help)
set_help = "The evaluation set, where there are several, such as eval_matched."
parser.add_argument("--set", help=set_help)
args = parse(parser)
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
    evaluated = [name for name in trace.sets if name not in ("training", "test")]
    chosen = args.set
    if chosen is None and len(evaluated) == 1:
        chosen = evaluated[0]
    if chosen not in evaluated:
        parser.error(
            f"argument --set: expected one of the evaluation sets of {folder} ({' '.join(evaluated)})"
        )
    return trace, trace.sets[chosen]


traces = {}
# Name -> TracedSet, of the runs that have such rows.
held_out = {}
own = {}
tested = {}
gammas = {}
for name, folder in zip(names, args.trainings, strict=True):
    trace, held_out[name] = read(folder)
    traces[name] = trace
    if "training" in trace.sets:
        own[name] = trace.sets["training"]
    if "test" in trace.sets:
        tested[name] = trace.sets["test"]
    if trace.gammas.size:
        gammas[name] = of_three_bins(trace.steps, trace.gammas)
for name, traced in (*held_out.items(), *own.items()):
    if not traced.rows.size or np.isnan(traced.row_confidence).any():
        parser.error(
            f"argument trainings: expected rows that {name} follows through all evaluations, got none; "
            "train without a change of the evaluation set, with n_kept_rows above 0"
        )
if any(
    traced.gaps.shape[1] != number_of_bins(held_out) for traced in held_out.values()
):
    parser.error("argument trainings: expected trainings with the same number of bins")

# Thirds of the shortest training, by which rows are grouped.
last = min(traced.epochs[-1] for traced in held_out.values())
boundaries = sorted({float(f"{last * part / 3:.3g}") for part in (1, 2)})
figures = confidence_figures(held_out, own, boundaries, tested)
figures["gaps"] = gaps_figure(held_out)
if own:
    figures["correspondence"] = correspondence_figure(held_out, own)
if gammas:
    figures["gammas"] = small_multiples(gammas, xlabel="step", ylabel="gamma", level=0)


def over_confidence(traced):
    """(T,) of all rows."""
    return np.nansum(traced.gaps * traced.counts, axis=1) / traced.n


def of_test_rows(traced):
    return {
        "n": int(traced.n[-1]),
        "accuracy": listed(traced.accuracy),
        "ece": listed(traced.ece),
        "adaptive_ece": listed(traced.adaptive_ece),
    }


def of_training_rows(traced):
    by_learned_epoch = learned_quartiles(traced, boundaries)
    return {
        "n": int(traced.n[-1]),
        "accuracy": listed(traced.accuracy),
        "ece": listed(traced.ece),
        "confidence_minus_accuracy": listed(over_confidence(traced)),
        "max_logit_quartiles_by_learned_epoch": by_learned_epoch,
    }


trainings = []
for name, traced in held_out.items():
    training = {
        "name": name,
        "loss": traces[name].loss,
        "epochs": listed(traced.epochs),
        "accuracy": listed(traced.accuracy),
        "ece": listed(traced.ece),
        "adaptive_ece": listed(traced.adaptive_ece),
        "confidence_minus_accuracy": listed(over_confidence(traced)),
        "gaps_at_the_end": listed(traced.gaps[-1]),
        "test_rows": None,
        "max_logit_quartiles": quartiles(traced.row_max_logit[-1]),
        "rival_quartiles": quartiles(traced.row_rival_probability[-1]),
        "gammas": None,
        "training_rows": None,
    }
    if name in tested:
        training["test_rows"] = of_test_rows(tested[name])
    if name in gammas:
        by_bin = gammas[name].items()
        training["gammas"] = {place: listed(values) for place, (_, values) in by_bin}
    if name in own:
        training["training_rows"] = of_training_rows(own[name])
    trainings.append(training)


def last_ece(rows):
    return f"{rows['ece'][-1]:.3f}" if rows else ""


header = ["training", "loss", "accuracy", "ECE", "least ECE, at epoch"]
header += ["ECE of training rows", "of test rows"]
rows = []
for training in trainings:
    best = np.argmin(training["ece"])
    least = f"{training['ece'][best]:.3f}, {training['epochs'][best]:g}"
    cells = [training["name"], training["loss"], f"{training['accuracy'][-1]:.3f}"]
    cells += [last_ece(training), least, last_ece(training["training_rows"])]
    rows.append([*cells, last_ece(training["test_rows"])])
print_table(header, rows)
record = {"settings": {"boundaries": boundaries}, "trainings": trainings}
write_study("traced_trainings", args, record, figures)
