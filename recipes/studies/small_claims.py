"""The papers' tables of losses and settings, on a small scale and next to cross entropy with a temperature.

    python recipes/studies/small_claims.py

Weight on the loss or on the gradient (BSCE-GRA, Table 2); rivals, gammas, AdaDualFocal and KDE-XE (dual focal, Tables
4, 13, 3 and 10); L1 and L2 (FCL, A.15); CalFocal, the number of bins and the frequency of updates (AdaFocal, 5.1, H
and I). The small CNN is trained on a part of 20 Newsgroups. Gammas and temperatures are fitted to validation rows, and
all metrics are on test rows that are used for nothing else. 46 settings with three seeds take half an hour on one core.
Each run is written to the csv file as soon as it ends, and `--resume` skips the runs in that file.
"""

import argparse
import tempfile
import time
from functools import partial

import numpy as np
import pandas as pd
from forest import difference_diagram
from newsgroups_cnn import NEWSGROUPS, SMALL, load_posts, make_trainer
from options import check_seeds, count, output_folder
from paired import corrected
from papers.rivals import batch_rival_loss
from records import kind_of_intervals, over_seeds, write_record
from results_tables import claim_lines
from scipy.special import softmax
from scipy.stats import ttest_1samp

from hf_calib.metrics import (
    accuracy,
    expected_calibration_error,
    kde_calibration_error,
    negative_log_likelihood,
)
from hf_calib.plots import save_figure
from hf_calib.scaling import TemperatureScaling


def of(loss, steps=None, **kwargs):
    return {"loss": loss, "loss_kwargs": kwargs, "gamma_update_steps": steps}


def gammas(*values):
    return {
        f"dual focal, gamma {gamma}": of("dual_focal", gamma=float(gamma))
        for gamma in values
    }


def of_batch(n_rivals):
    """Dual focal loss with the rule of its authors' code for a mean of rivals."""
    loss_function = partial(batch_rival_loss, gamma=5.0, n_rivals=n_rivals)
    return {"loss_function": loss_function}


def fcl(gamma, weight):
    return {
        f"FCL, gamma {gamma}, lambda {weight}, {distance.upper()}": of(
            "focal_calibration",
            gamma=float(gamma),
            brier_weight=weight,
            distance=distance,
        )
        for distance in ("l1", "l2")
    }


def calfocal(equation, *rates):
    return {
        f"CalFocal, Eq. {equation}, lambda {rate}": of(
            "calfocal", update_rate=float(rate), per_sample=equation == 2
        )
        for rate in rates
    }


def bins(*numbers):
    return {
        f"AdaFocal, {n_bins} bins": of("adafocal", n_bins=n_bins) for n_bins in numbers
    }


BASELINE = "cross entropy"
CROSS_ENTROPY, FLSD, ADAFOCAL = (
    {BASELINE: of("cross_entropy")},
    {"FLSD-53": of("flsd")},
    {"AdaFocal": of("adafocal")},
)
# Page of the paper -> its table -> the settings, which are trained once where several tables have them.
PAGES = {
    "bsce_gra": {
        "weights": {
            **CROSS_ENTROPY,
            "focal, gamma 3": of("focal"),
            "focal-GRA, gamma 3": of("focal_gra"),
            **FLSD,
            "FLSD-53-GRA": of("flsd_gra"),
            **gammas(5),
            "dual focal-GRA, gamma 5": of("dual_focal_gra"),
            "BSCE, gamma 2": of("bsce"),
            "BSCE-GRA, gamma 2": of("bsce_gra"),
            "BSCE, gamma 4": of("bsce", gamma=4.0),
            "BSCE-GRA, gamma 4": of("bsce_gra", gamma=4.0),
            "ECE-CE": of("ece_ce"),
        }
    },
    "dual_focal": {
        "rivals": {
            **CROSS_ENTROPY,
            **FLSD,
            "rival 0.1": of("dual_focal", rival=0.1),
            "rival 0.2": of("dual_focal", rival=0.2),
            "second rival": of("dual_focal", rival="second"),
            "third rival": of("dual_focal", rival="third"),
            "mean of 2 rivals": of("dual_focal", rival="mean2"),
            "mean of 3 rivals": of("dual_focal", rival="mean3"),
            "mean of all rivals": of("dual_focal", rival="mean_all"),
            "mean of 2 rivals, authors' code": of_batch(2),
            "mean of 3 rivals, authors' code": of_batch(3),
            "mean of all rivals, authors' code": of_batch(None),
            **gammas(5),
        },
        "gammas": {**CROSS_ENTROPY, **gammas(2, 3, 4, 5, 10)},
        "adaptive": {
            **CROSS_ENTROPY,
            **FLSD,
            **ADAFOCAL,
            **gammas(5),
            "AdaDualFocal": of("ada_dual_focal"),
        },
        "KDE-XE": {
            **CROSS_ENTROPY,
            "KDE-XE": of("kde_ece", kind="canonical"),
            **gammas(5),
        },
    },
    "focal_calibration": {"distances": {**CROSS_ENTROPY, **fcl(4, 1.5), **fcl(5, 4.5)}},
    "adafocal": {
        "CalFocal": {
            **CROSS_ENTROPY,
            **FLSD,
            **calfocal(2, 1, 10, 100),
            **calfocal(3, 1, 10, 100),
            **ADAFOCAL,
        },
        "bins": {
            **CROSS_ENTROPY,
            **FLSD,
            **bins(5, 10),
            **ADAFOCAL,
            **bins(20, 30, 50),
        },
        "updates": {
            **CROSS_ENTROPY,
            **ADAFOCAL,
            "AdaFocal, every 100 batches": of("adafocal", 100),
            "AdaFocal, every 10 batches": of("adafocal", 10),
        },
    },
}
# ECE in %, or ECE and ECE after T; of KDE-XE ECE and canonical error; ResNet-50 on CIFAR-10 (KDE-XE: ResNet-110).
PAPER = {
    "weights": {
        "FLSD-53": (1.26, 1.15),
        "FLSD-53-GRA": (0.88, 0.88),
        "dual focal, gamma 5": (1.00, 1.00),
        "dual focal-GRA, gamma 5": (0.93, 0.84),
        "BSCE, gamma 4": (0.88, 0.88),
        "BSCE-GRA, gamma 4": (0.74, 0.74),
    },
    "rivals": {
        "FLSD-53": (1.55,),
        "rival 0.1": (1.15,),
        "rival 0.2": (2.10,),
        "second rival": (1.12,),
        "third rival": (1.34,),
        "mean of 2 rivals, authors' code": (0.80,),
        "mean of 3 rivals, authors' code": (0.61,),
        "mean of all rivals, authors' code": (0.52,),
        "dual focal, gamma 5": (0.46,),
    },
    "gammas": {
        "dual focal, gamma 2": (2.156, 0.8553),
        "dual focal, gamma 3": (1.79, 1.179),
        "dual focal, gamma 4": (1.617, 1.024),
        "dual focal, gamma 5": (0.461, 0.461),
        "dual focal, gamma 10": (1.096, 1.096),
    },
    "adaptive": {
        "FLSD-53": (1.55,),
        "AdaFocal": (0.66,),
        "dual focal, gamma 5": (0.46,),
        "AdaDualFocal": (0.43,),
    },
    "KDE-XE": {
        BASELINE: (3.89, 0.133),
        "KDE-XE": (3.093, 0.126),
        "dual focal, gamma 5": (0.40, 0.153),
    },
    "distances": {
        "FCL, gamma 4, lambda 1.5, L1": (1.78,),
        "FCL, gamma 4, lambda 1.5, L2": (0.76,),
    },
    "bins": {
        "FLSD-53": (1.67,),
        "AdaFocal, 5 bins": (0.63,),
        "AdaFocal, 10 bins": (0.53,),
        "AdaFocal": (0.56,),
        "AdaFocal, 20 bins": (0.40,),
        "AdaFocal, 30 bins": (0.84,),
        "AdaFocal, 50 bins": (1.10,),
    },
}
# What the papers compare: the first less the second, seed by seed.
PAIRS = {
    "weights": [
        ("focal-GRA, gamma 3", "focal, gamma 3"),
        ("FLSD-53-GRA", "FLSD-53"),
        ("dual focal-GRA, gamma 5", "dual focal, gamma 5"),
        ("BSCE-GRA, gamma 2", "BSCE, gamma 2"),
        ("BSCE-GRA, gamma 4", "BSCE, gamma 4"),
    ],
    "rivals": [
        ("dual focal, gamma 5", "FLSD-53"),
        ("dual focal, gamma 5", "second rival"),
        ("dual focal, gamma 5", "mean of all rivals"),
        ("dual focal, gamma 5", "mean of all rivals, authors' code"),
    ],
    "gammas": [
        ("dual focal, gamma 5", f"dual focal, gamma {gamma}") for gamma in (2, 10)
    ],
    "adaptive": [
        ("AdaDualFocal", "AdaFocal"),
        ("AdaDualFocal", "dual focal, gamma 5"),
        ("AdaFocal", "dual focal, gamma 5"),
    ],
    "KDE-XE": [("dual focal, gamma 5", "KDE-XE"), ("KDE-XE", BASELINE)],
    "distances": [
        (f"{name}, L2", f"{name}, L1")
        for name in ("FCL, gamma 4, lambda 1.5", "FCL, gamma 5, lambda 4.5")
    ],
    "CalFocal": [
        *((f"CalFocal, Eq. {equation}, lambda 10", "FLSD-53") for equation in (2, 3)),
        *(
            (
                f"CalFocal, Eq. {equation}, lambda 100",
                f"CalFocal, Eq. {equation}, lambda 1",
            )
            for equation in (2, 3)
        ),
        ("AdaFocal", "CalFocal, Eq. 3, lambda 10"),
    ],
    "bins": [
        (f"AdaFocal, {n_bins} bins", "AdaFocal") for n_bins in (5, 10, 20, 30, 50)
    ],
    "updates": [
        (f"AdaFocal, every {steps} batches", "AdaFocal") for steps in (100, 10)
    ],
}
CRITERIA = {"nll": "", "ece": " by ECE", "adaptive_ece": " by equal-mass ECE"}
MORE = {  # of some tables: title -> column
    "KDE-XE": {
        "canonical error, bandwidth .1": "canonical_error",
        "bandwidth .001": "canonical_error_at_.001",
    },
    "updates": {"ECE, %, mean over the epochs": "mean_ece_by_epoch"},
}

parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
)
parser.add_argument(
    "--data", default=NEWSGROUPS, help="This, a dataset on the Hub, or a folder."
)
parser.add_argument(
    "--without_headers", action="store_true", help="Of data whose texts have none."
)
parser.add_argument(
    "--name", default="small_claims", help="Of the files; for other data, another one."
)
parser.add_argument("--output", type=output_folder, default="outputs/studies")
parser.add_argument(
    "--pages",
    nargs="+",
    choices=PAGES,
    default=list(PAGES),
    help="Of docs/papers; all by default.",
)
parser.add_argument(
    "--resume",
    action="store_true",
    help="Keep the runs of the csv file that have these sizes.",
)
parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
parser.add_argument("--rows", type=count, default=2000)
parser.add_argument("--validation_rows", type=count, default=1000)
parser.add_argument("--test_rows", type=count, default=3000)
parser.add_argument("--epochs", type=count, default=10)
args = parser.parse_args()
check_seeds(parser, args.seeds, at_least=2)
sizes = {
    name: getattr(args, name)
    for name in ("rows", "validation_rows", "test_rows", "epochs")
}
settings = {**SMALL, **sizes, "validation_rows": args.validation_rows + args.test_rows}


def load(seed):
    """Rows to train with, to validate and to test, and the tokenizer."""
    train_rows, held_out, tokenizer = load_posts(
        args.data, settings, seed, with_headers=not args.without_headers
    )
    held_out = held_out.shuffle(seed)
    validation = held_out.select(range(args.validation_rows))
    return (
        train_rows,
        validation,
        held_out.select(range(args.validation_rows, len(held_out))),
        tokenizer,
    )


def train(splits, seed, arguments):
    """Train; what the csv file has of it."""
    train_rows, validation, test, tokenizer = splits
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            (train_rows, validation, tokenizer),
            settings,
            folder,
            seed=seed,
            **arguments,
        )
        trainer.train()
        held_out, tested = (trainer.predict(rows) for rows in (validation, test))
    labels = tested.label_ids
    found = {
        "mean_ece_by_epoch": pd.DataFrame(trainer.state.log_history)["eval_ece"].mean()
    }

    def measure(name, probs):
        found[f"nll{name}"] = negative_log_likelihood(probs, labels)
        found[f"ece{name}"] = expected_calibration_error(probs, labels)
        found[f"adaptive_ece{name}"] = expected_calibration_error(
            probs, labels, binning="quantile"
        )

    raw = softmax(tested.predictions.astype(float), axis=1)
    found["accuracy"] = accuracy(raw, labels)
    # Ours, and that of the evaluation in the dual focal authors' code.
    for name, bandwidth in (
        ("canonical_error", 0.1),
        ("canonical_error_at_.001", 0.001),
    ):
        found[name] = kde_calibration_error(
            raw, labels, kind="canonical", bandwidth=bandwidth
        )
    measure("", raw)
    for criterion, name in CRITERIA.items():
        scaler = TemperatureScaling(criterion).fit(
            held_out.predictions, held_out.label_ids
        )
        found[f"T{name}"] = scaler.temperature_
        measure(f" after T{name}", scaler.predict_proba(tested.predictions))
    return found


path = args.output / f"{args.name}.csv"
path.parent.mkdir(parents=True, exist_ok=True)
resumes = args.resume and path.exists()
runs = (
    pd.read_csv(path) if resumes else pd.DataFrame(columns=["setting", "seed", *sizes])
)
runs = runs[(runs[list(sizes)] == list(sizes.values())).all(axis=1)]
to_train = {
    name: arguments
    for page in args.pages
    for table in PAGES[page].values()
    for name, arguments in table.items()
}
for seed in args.seeds:
    done = set(runs.loc[runs["seed"] == seed, "setting"])
    splits = load(seed) if set(to_train) - done else None
    for name in [name for name in to_train if name not in done]:
        began = time.perf_counter()
        found = train(splits, seed, to_train[name])
        found["seconds"] = round(time.perf_counter() - began, 1)
        runs = pd.concat(
            [runs, pd.DataFrame([{"setting": name, "seed": seed, **sizes, **found}])]
        )
        runs.to_csv(path, index=False, float_format="%.6g")
        print(
            f"seed {seed}  {name:<32} accuracy {found['accuracy']:.3f}, ECE {found['ece']:.3f}",
            flush=True,
        )
runs = pd.read_csv(path).set_index(["setting", "seed"])  # as the file has them


def columns_of(page, table):
    """Title -> column of the csv file, with T as the page's paper chooses it; the NLL is after T by NLL."""
    ece, by = (
        ("adaptive_ece", " by equal-mass ECE")
        if page == "adafocal"
        else ("ece", " by ECE")
    )
    title = "equal-mass ECE" if page == "adafocal" else "ECE"
    return {
        "accuracy": "accuracy",
        f"{title}, %": ece,
        f"{title} after T, %": f"{ece} after T{by}",
        "T": f"T{by}",
        "NLL after T": "nll after T",
        **MORE.get(table, {}),
    }


def by_seed(name, column):
    return runs.loc[name, column].loc[args.seeds].to_numpy()


def less_baseline(name, column, after):
    """The differences to the baseline with a temperature, seed by seed."""
    return by_seed(name, column) - by_seed(BASELINE, after)


def mean(values):
    """The mean with its interval, where all are equal as well, such as temperatures of a grid."""
    return (
        over_seeds(values)
        if np.ptp(values)
        else dict.fromkeys(("value", "low", "high"), float(values[0]))
    )


def p_value(values):
    return float(ttest_1samp(values, 0).pvalue) if np.ptp(values) else 1.0


def difference(values):
    return *mean(values).values(), p_value(values)


pages = {}
for page in args.pages:
    pages[page], drawn = {}, {"ECE": {}, "NLL": {}}
    for table, members in PAGES[page].items():
        columns = columns_of(page, table)
        _, ece, ece_after, *_ = columns.values()
        rows = {}
        for name in members:
            rows[name] = {
                title: mean(by_seed(name, column)) for title, column in columns.items()
            }
            rows[name]["less cross entropy's"] = mean(
                less_baseline(name, "nll after T", "nll after T")
            )
            rows[name]["paper"] = PAPER.get(table, {}).get(name, ())
            if name != BASELINE:
                for metric, before, after in (
                    ("ECE", ece, ece_after),
                    ("NLL", "nll", "nll after T"),
                ):
                    drawn[metric][name] = {
                        "none": difference(less_baseline(name, before, after)),
                        "temperature": difference(less_baseline(name, after, after)),
                    }
        pages[page][table] = {"columns": columns, "rows": rows}
        compared = {title: column for title, column in columns.items() if title != "T"}
        pairs = {}
        for first, second in PAIRS[table]:
            pairs[f"{first} less {second}"] = {}
            for title, column in compared.items():
                differences = by_seed(first, column) - by_seed(second, column)
                of_pair = mean(differences) | {"p": p_value(differences)}
                pairs[f"{first} less {second}"][title] = of_pair
        pages[page][f"{table}, compared"] = {"columns": {}, "rows": pairs}
    # Holm's correction over all comparisons of the page.
    comparisons = [
        comparison
        for table in PAGES[page]
        for pair in pages[page][f"{table}, compared"]["rows"].values()
        for comparison in pair.values()
    ]
    p_values = corrected([comparison["p"] for comparison in comparisons])
    for comparison, p in zip(comparisons, p_values.tolist(), strict=True):
        comparison["p_corrected"] = p
    for table in PAGES[page]:
        rows, pairs = (
            pages[page][name]["rows"] for name in (table, f"{table}, compared")
        )
        print(f"\n{page}, {table}")
        print("", *claim_lines(rows), "", *claim_lines(pairs), sep="\n")
    print(f"\n{len(comparisons)} comparisons on this page")
    figure = difference_diagram(drawn, baseline="cross entropy with a temperature")
    save_figure(figure, args.output / f"{args.name}_{page}.png")

# How much the criterion of T matters, over all runs.
ours = runs.loc[list(to_train)]
by_criterion = {
    "ECE after T by NLL": ours["ece after T"].mean(),
    "ECE after T by ECE": ours["ece after T by ECE"].mean(),
    "mean absolute difference": np.abs(
        ours["ece after T"] - ours["ece after T by ECE"]
    ).mean(),
    "NLL lost by T by ECE": (ours["nll after T by ECE"] - ours["nll after T"]).mean(),
}
record = {
    "settings": settings,
    "seeds": args.seeds,
    "intervals": kind_of_intervals(args.seeds),
    "pages": pages,
    "criterion of T": by_criterion,
    "seconds": round(ours["seconds"].sum(), 1),
}
write_record(args.output / f"{args.name}.json", record)
print(
    "\n" + "\n".join(f"{title}: {value:.4f}" for title, value in by_criterion.items())
)
print(f"\nWritten to {args.output}/{args.name}*")
