"""The papers' tables of losses and settings, on a small scale and next to cross entropy with a temperature.

    python recipes/studies/small_claims.py

Weight on the loss or on the gradient (BSCE-GRA, Table 2); rivals, gammas, AdaDualFocal and KDE-XE
(dual focal, Tables 4, 13, 3 and 10); L1 and L2 (FCL, A.15); CalFocal, the number of bins and the
frequency of updates (AdaFocal, 5.1, H and I). The small CNN is trained on a part of 20 Newsgroups.
Gammas and temperatures are fitted to validation rows, and all metrics are on test rows that are
used for nothing else. 46 settings with three seeds take half an hour on one core. Each run is
written to the csv file as soon as it ends, and `--resume` skips the runs in that file.
"""

import tempfile
import time
from functools import partial

import numpy as np
import pandas as pd
from forest import difference_diagram
from newsgroups_cnn import NEWSGROUPS, SMALL, load_posts, make_trainer
from options import count, parse, study_parser
from paired import corrected
from papers.rivals import batch_rival_loss
from records import kind_of_intervals, over_seeds, write_study
from results_tables import claim_lines
from scipy.special import softmax
from scipy.stats import ttest_1samp

from hf_calib.metrics import (
    accuracy,
    expected_calibration_error,
    kde_calibration_error,
    negative_log_likelihood,
)
from hf_calib.scaling import TemperatureScaling

# Settings, as the arguments of `make_trainer`


def of(loss, steps=None, **kwargs):
    return {"loss": loss, "loss_kwargs": kwargs, "gamma_update_steps": steps}


def gammas(*values):
    return {
        f"dual focal, gamma {gamma}": of("dual_focal", gamma=float(gamma))
        for gamma in values
    }


def of_batch(n_rivals):
    """Dual focal loss with the rule of its authors' code for a mean of rivals."""
    return {"loss_function": partial(batch_rival_loss, gamma=5.0, n_rivals=n_rivals)}


def fcl(gamma, weight):
    name = f"FCL, gamma {gamma}, lambda {weight}"
    options = {"gamma": float(gamma), "brier_weight": weight}
    return {
        f"{name}, L1": of("focal_calibration", distance="l1", **options),
        f"{name}, L2": of("focal_calibration", distance="l2", **options),
    }


def calfocal(equation, *rates):
    per_sample = equation == 2
    return {
        f"CalFocal, Eq. {equation}, lambda {rate}": of(
            "calfocal", update_rate=float(rate), per_sample=per_sample
        )
        for rate in rates
    }


def bins(*numbers):
    return {
        f"AdaFocal, {n_bins} bins": of("adafocal", n_bins=n_bins) for n_bins in numbers
    }


BASELINE = "cross entropy"
CROSS_ENTROPY = {BASELINE: of("cross_entropy")}
FLSD = {"FLSD-53": of("flsd")}
ADAFOCAL = {"AdaFocal": of("adafocal")}
# Page of the paper -> its table -> the settings, which are trained once where several tables have
# them.
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
# ECE in %, or ECE and ECE after T; of KDE-XE ECE and canonical error; ResNet-50 on CIFAR-10
# (KDE-XE: ResNet-110).
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
        ("dual focal, gamma 5", "dual focal, gamma 2"),
        ("dual focal, gamma 5", "dual focal, gamma 10"),
    ],
    "adaptive": [
        ("AdaDualFocal", "AdaFocal"),
        ("AdaDualFocal", "dual focal, gamma 5"),
        ("AdaFocal", "dual focal, gamma 5"),
    ],
    "KDE-XE": [("dual focal, gamma 5", "KDE-XE"), ("KDE-XE", BASELINE)],
    "distances": [
        ("FCL, gamma 4, lambda 1.5, L2", "FCL, gamma 4, lambda 1.5, L1"),
        ("FCL, gamma 5, lambda 4.5, L2", "FCL, gamma 5, lambda 4.5, L1"),
    ],
    "CalFocal": [
        ("CalFocal, Eq. 2, lambda 10", "FLSD-53"),
        ("CalFocal, Eq. 3, lambda 10", "FLSD-53"),
        ("CalFocal, Eq. 2, lambda 100", "CalFocal, Eq. 2, lambda 1"),
        ("CalFocal, Eq. 3, lambda 100", "CalFocal, Eq. 3, lambda 1"),
        ("AdaFocal", "CalFocal, Eq. 3, lambda 10"),
    ],
    "bins": [
        (f"AdaFocal, {n_bins} bins", "AdaFocal") for n_bins in (5, 10, 20, 30, 50)
    ],
    "updates": [
        ("AdaFocal, every 100 batches", "AdaFocal"),
        ("AdaFocal, every 10 batches", "AdaFocal"),
    ],
}
# What a temperature is chosen by -> the end of its columns.
CRITERIA = {"nll": "", "ece": " by ECE", "adaptive_ece": " by equal-mass ECE"}
# Of some tables: title -> column
MORE = {
    "KDE-XE": {
        "canonical error, bandwidth .1": "canonical_error",
        "bandwidth .001": "canonical_error_at_.001",
    },
    "updates": {"ECE, %, mean over the epochs": "mean_ece_by_epoch"},
}

parser = study_parser(__doc__, seeds=range(3), data=NEWSGROUPS)
add = parser.add_argument
add("--without_headers", action="store_true", help="Of data whose texts have none.")
add("--name", default="small_claims", help="Of the files; another for other data.")
add("--pages", nargs="+", choices=PAGES, default=list(PAGES), help="Of docs/papers.")
add("--resume", action="store_true", help="Keep the csv file's runs of these sizes.")
add("--rows", type=count, default=2000)
add("--validation_rows", type=count, default=1000)
add("--test_rows", type=count, default=3000)
add("--epochs", type=count, default=10)
args = parse(parser, fewest_seeds=2)
SIZES = ("rows", "validation_rows", "test_rows", "epochs")
sizes = {name: getattr(args, name) for name in SIZES}
settings = SMALL | sizes
settings["validation_rows"] += args.test_rows


def load(seed):
    """Rows to train with, to validate and to test, and the tokenizer."""
    with_headers = not args.without_headers
    train_rows, held_out, tokenizer = load_posts(
        args.data, settings, seed, with_headers=with_headers
    )
    held_out = held_out.shuffle(seed)
    validation = held_out.select(range(args.validation_rows))
    test = held_out.select(range(args.validation_rows, len(held_out)))
    return train_rows, validation, test, tokenizer


def errors(probs, labels, state=""):
    equal_mass = expected_calibration_error(probs, labels, binning="quantile")
    return {
        f"nll{state}": negative_log_likelihood(probs, labels),
        f"ece{state}": expected_calibration_error(probs, labels),
        f"adaptive_ece{state}": equal_mass,
    }


def canonical_error(probs, labels, bandwidth):
    return kde_calibration_error(probs, labels, kind="canonical", bandwidth=bandwidth)


def train(splits, seed, arguments):
    """Train; what the csv file has of it."""
    train_rows, validation, test, tokenizer = splits
    posts = train_rows, validation, tokenizer
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(posts, settings, folder, seed=seed, **arguments)
        trainer.train()
        held_out = trainer.predict(validation)
        tested = trainer.predict(test)
    logits = tested.predictions
    labels = tested.label_ids
    raw = softmax(logits.astype(float), axis=1)
    by_epoch = pd.DataFrame(trainer.state.log_history)
    found = {
        "mean_ece_by_epoch": by_epoch["eval_ece"].mean(),
        "accuracy": accuracy(raw, labels),
        # Ours, and that of the evaluation in the dual focal authors' code.
        "canonical_error": canonical_error(raw, labels, 0.1),
        "canonical_error_at_.001": canonical_error(raw, labels, 0.001),
    }
    found |= errors(raw, labels)
    for criterion, name in CRITERIA.items():
        scaler = TemperatureScaling(criterion)
        scaler.fit(held_out.predictions, held_out.label_ids)
        found[f"T{name}"] = scaler.temperature_
        calibrated = scaler.predict_proba(logits)
        found |= errors(calibrated, labels, f" after T{name}")
    return found


path = args.output / f"{args.name}.csv"
path.parent.mkdir(parents=True, exist_ok=True)
runs = pd.DataFrame(columns=["setting", "seed", *sizes])
if args.resume and path.exists():
    runs = pd.read_csv(path)
    has_these_sizes = (runs[list(sizes)] == list(sizes.values())).all(axis=1)
    runs = runs[has_these_sizes]
members = {}
for page in args.pages:
    for table in PAGES[page].values():
        members |= table
for seed in args.seeds:
    done = set(runs.loc[runs["seed"] == seed, "setting"])
    waiting = [name for name in members if name not in done]
    if not waiting:
        continue
    splits = load(seed)
    for name in waiting:
        began = time.perf_counter()
        found = train(splits, seed, members[name])
        found["seconds"] = round(time.perf_counter() - began, 1)
        run = {"setting": name, "seed": seed, **sizes, **found}
        runs = pd.concat([runs, pd.DataFrame([run])])
        runs.to_csv(path, index=False, float_format="%.6g")
        numbers = f"accuracy {found['accuracy']:.3f}, ECE {found['ece']:.3f}"
        print(f"seed {seed}  {name:<32} {numbers}", flush=True)
# The numbers are those that the file has.
runs = pd.read_csv(path).set_index(["setting", "seed"])

# The tables


def columns_of(page, table):
    """Title -> column of the csv file, with T as the page's paper chooses it; the NLL is after T by NLL."""
    title, ece, by = "ECE", "ece", " by ECE"
    if page == "adafocal":
        title, ece, by = "equal-mass ECE", "adaptive_ece", " by equal-mass ECE"
    columns = {
        "accuracy": "accuracy",
        f"{title}, %": ece,
        f"{title} after T, %": f"{ece} after T{by}",
        "T": f"T{by}",
        "NLL after T": "nll after T",
    }
    return columns | MORE.get(table, {})


def by_seed(name, column):
    return runs.loc[name, column].loc[args.seeds].to_numpy()


def less_baseline(name, column, after):
    """The differences to the baseline with a temperature, seed by seed."""
    return by_seed(name, column) - by_seed(BASELINE, after)


def mean(values):
    """The mean with its interval, where all are equal as well, such as temperatures of a grid."""
    if np.ptp(values):
        return over_seeds(values)
    return dict.fromkeys(("value", "low", "high"), float(values[0]))


def with_p(values):
    """The mean of differences with its interval and its p."""
    p = float(ttest_1samp(values, 0).pvalue) if np.ptp(values) else 1.0
    return mean(values) | {"p": p}


def table_rows(page, table):
    columns = columns_of(page, table)
    rows = {}
    for name in PAGES[page][table]:
        row = {title: mean(by_seed(name, column)) for title, column in columns.items()}
        change = less_baseline(name, "nll after T", "nll after T")
        row["less cross entropy's"] = mean(change)
        row["paper"] = PAPER.get(table, {}).get(name, ())
        rows[name] = row
    return rows


def pair_rows(page, table):
    """What the papers compare."""
    columns = columns_of(page, table)
    del columns["T"]
    rows = {}
    for first, second in PAIRS[table]:
        rows[f"{first} less {second}"] = {
            title: with_p(by_seed(first, column) - by_seed(second, column))
            for title, column in columns.items()
        }
    return rows


def correct(comparisons):
    """Holm's correction, written into each of the comparisons."""
    p_values = corrected([comparison["p"] for comparison in comparisons])
    for comparison, p in zip(comparisons, p_values.tolist(), strict=True):
        comparison["p_corrected"] = p


def differences_drawn(page):
    """Metric -> setting -> calibrator -> difference to the baseline, of all tables of a page."""
    drawn = {"ECE": {}, "NLL": {}}
    for table, of_table in PAGES[page].items():
        _, ece, ece_after, *_ = columns_of(page, table).values()
        for name in of_table:
            if name == BASELINE:
                continue
            of_ece = {"none": ece, "temperature": ece_after}
            of_nll = {"none": "nll", "temperature": "nll after T"}
            for metric, states in (("ECE", of_ece), ("NLL", of_nll)):
                after = states["temperature"]
                drawn[metric][name] = {
                    state: tuple(with_p(less_baseline(name, column, after)).values())
                    for state, column in states.items()
                }
    return drawn


pages = {}
figures = {}
for page in args.pages:
    pages[page] = {}
    comparisons = []
    for table in PAGES[page]:
        rows = table_rows(page, table)
        pairs = pair_rows(page, table)
        pages[page][table] = {"columns": columns_of(page, table), "rows": rows}
        pages[page][f"{table}, compared"] = {"columns": {}, "rows": pairs}
        for pair in pairs.values():
            comparisons += pair.values()
    # The family is all comparisons of the page.
    correct(comparisons)
    for table, found in pages[page].items():
        print(f"\n{page}, {table}\n", *claim_lines(found["rows"]), sep="\n")
    print(f"\n{len(comparisons)} comparisons on this page")
    drawn = differences_drawn(page)
    against = "cross entropy with a temperature"
    figures[page] = difference_diagram(drawn, baseline=against)

# How much the criterion of T matters, over all runs.
ours = runs.loc[list(members)]
ece_difference = ours["ece after T"] - ours["ece after T by ECE"]
nll_lost = ours["nll after T by ECE"] - ours["nll after T"]
by_criterion = {
    "ECE after T by NLL": ours["ece after T"].mean(),
    "ECE after T by ECE": ours["ece after T by ECE"].mean(),
    "mean absolute difference": ece_difference.abs().mean(),
    "NLL lost by T by ECE": nll_lost.mean(),
}
print()
for title, value in by_criterion.items():
    print(f"{title}: {value:.4f}")
record = {
    "settings": settings,
    "intervals": kind_of_intervals(args.seeds),
    "pages": pages,
    "criterion of T": by_criterion,
    # Of all runs, also of those of an earlier start.
    "seconds": round(ours["seconds"].sum(), 1),
}
write_study(args.name, args, record, figures)
