"""The map that is chosen on few calibration rows, against a temperature: is it ever clearly worse?

    OMP_NUM_THREADS=1 python benchmarks/few_rows.py --data ../shared/data --results outputs/few_rows.jsonl

Networks of scikit-learn on features that take seconds: tf-idf (200 components) of three text data sets, pixels (100
components) of two image data sets; each a logistic regression, a network with one hidden layer after 5 epochs, and
after 40. A third of the training rows is the pool of calibration rows. From it 50, 100 and 300 rows are drawn --draws
times; the table has the mean NLL on the test rows of the logits as they are, of a temperature, and of what
`AutoScaling` chooses, and the mean difference of the last two with its 95% interval over the draws. A run that was
stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from PIL import Image
from scipy.special import log_softmax
from sklearn.decomposition import PCA, TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler

from hf_calib.scaling import AutoScaling, TemperatureScaling

SIZES = (50, 100, 300)
TEXTS = {
    "20newsgroups": ("train.parquet", "test.parquet"),
    "ag_news": ("train_20k.csv.gz", "test.csv.gz"),
    "clinc150": ("train.csv.gz", "test.csv.gz"),
}
IMAGES = ("mnist", "cifar10")
MODELS = {
    "logistic": lambda: LogisticRegression(max_iter=300),
    "network, 5 epochs": lambda: MLPClassifier(128, max_iter=5, random_state=0),
    "network, 40 epochs": lambda: MLPClassifier(128, max_iter=40, random_state=0),
}
_MOST_TRAIN, _MOST_TEST = 12_000, 5_000

Rows = tuple[NDArray[Any], NDArray[np.int64]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--draws", type=int, default=20)
    args = parser.parse_args()
    args.results.parent.mkdir(parents=True, exist_ok=True)
    args.results.touch()
    done = [json.loads(line) for line in args.results.read_text().splitlines()]
    known = {(r["data"], r["model"]) for r in done if r["draw"] == args.draws - 1 and r["n"] == SIZES[-1]}
    done = [r for r in done if (r["data"], r["model"]) in known]
    args.results.write_text("".join(json.dumps(r) + "\n" for r in done))
    warnings.simplefilter("ignore")  # fits that stop early, and classes without a row, are part of it
    with args.results.open("a") as file:
        for result in measured(args.data, args.draws, known):
            done.append(result)
            file.write(json.dumps(result) + "\n")
            file.flush()
    print(table(done))


def networks(data: Path, known: set[tuple[str, str]]) -> Iterator[tuple[str, str, Rows, Rows]]:
    """Logits and labels of each network that is not known yet, of the pool and of the test rows."""
    for name in (*TEXTS, *IMAGES):
        wanted = {model: make for model, make in MODELS.items() if (name, model) not in known}
        if not wanted:
            continue
        (x, y), (test_x, test_y) = features(data, name)
        order = np.random.default_rng(0).permutation(len(y))
        pool, train = order[: len(y) // 3], order[len(y) // 3 :]
        for model, make in wanted.items():
            fitted = make().fit(x[train], y[train])
            assert len(fitted.classes_) == y.max() + 1
            logits = [np.log(np.maximum(fitted.predict_proba(rows), 1e-30)) for rows in (x[pool], test_x)]
            yield name, model, (logits[0], y[pool]), (logits[1], test_y)


def features(data: Path, name: str) -> tuple[Rows, Rows]:
    """Features and labels of the training rows and of the test rows."""
    rng = np.random.default_rng(0)
    if name in IMAGES:
        sets = []
        for part, most in (("train", _MOST_TRAIN), ("test", _MOST_TEST)):
            frame = pd.read_parquet(data / name / f"{part}.parquet")
            frame = frame.iloc[rng.permutation(len(frame))[:most]]
            column = next(c for c in ("image", "img") if c in frame)
            sets.append((np.stack([pixels(cell) for cell in frame[column]]), frame["label"].to_numpy()))
        reduce: Any = PCA(100, random_state=0)
    else:
        sets = []
        for part, most in zip(TEXTS[name], (_MOST_TRAIN, _MOST_TEST), strict=True):
            path = data / name / part
            frame = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
            frame = frame.iloc[rng.permutation(len(frame))[:most]]
            labels = frame["label"].to_numpy()
            sets.append((frame["text"].astype(str).to_numpy(), labels))
        vectorizer = TfidfVectorizer(max_features=20_000, sublinear_tf=True).fit(sets[0][0])
        sets = [(vectorizer.transform(texts), labels) for texts, labels in sets]
        reduce = TruncatedSVD(200, random_state=0)
    names = np.unique(sets[0][1])
    reduce.fit(sets[0][0])
    scale = StandardScaler().fit(reduce.transform(sets[0][0]))
    found = []
    for rows, labels in sets:
        kept = np.isin(labels, names)
        numbers = np.searchsorted(names, labels[kept]).astype(np.int64)
        found.append((scale.transform(reduce.transform(rows[np.flatnonzero(kept)])), numbers))
    return found[0], found[1]


def pixels(cell: Any) -> NDArray[np.float32]:
    import io

    image = Image.open(io.BytesIO(cell["bytes"] if isinstance(cell, dict) else cell))
    return np.asarray(image, dtype=np.float32).reshape(-1) / 255


def measured(data: Path, draws: int, known: set[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    for name, model, (pool, pool_labels), (test, labels) in networks(data, known):
        for n in SIZES:
            for draw in range(draws):
                rows = np.random.default_rng([draw, n]).permutation(len(pool))[:n]
                auto = AutoScaling().fit(pool[rows], pool_labels[rows])
                temperature = TemperatureScaling().fit(pool[rows], pool_labels[rows])
                maps = {
                    "none": test,
                    "temperature": temperature.transform(test),
                    "auto": auto.transform(test),
                }
                found = {key: nll(logits, labels) for key, logits in maps.items()}
                yield {"data": name, "model": model, "n": n, "draw": draw, "choice": auto.choice_, **found}


def nll(logits: NDArray[Any], labels: NDArray[np.int64]) -> float:
    return float(-log_softmax(logits, axis=1)[np.arange(len(labels)), labels].mean())


def table(results: list[dict[str, Any]]) -> str:
    lines = ["| data, network, rows | NLL: none, T, auto | auto less T | auto chose |", "|---|---|---|---|"]
    by_size: dict[int, list[float]] = {}
    for data, model, n in dict.fromkeys((r["data"], r["model"], r["n"]) for r in results):
        rows = [r for r in results if (r["data"], r["model"], r["n"]) == (data, model, n)]
        means = ", ".join(f"{np.mean([r[key] for r in rows]):.4f}" for key in ("none", "temperature", "auto"))
        gaps = np.array([r["auto"] - r["temperature"] for r in rows])
        resampled = np.random.default_rng(0).choice(gaps, (1000, len(gaps))).mean(axis=1)
        low, high = np.quantile(resampled, [0.025, 0.975])
        chose = Counter(r["choice"].partition("(")[0] for r in rows)
        chosen = ", ".join(f"{name} {count}" for name, count in chose.most_common())
        by_size.setdefault(n, []).append(float(gaps.mean()))
        lines.append(
            f"| {data}, {model}, {n} | {means} | {gaps.mean():+.4f} [{low:+.4f}, {high:+.4f}] | {chosen} |"
        )
    for n, each in by_size.items():
        lines.append(
            f"\n{n} rows: {np.mean(each):+.4f} nats on average over {len(each)} networks, at most {max(each):+.4f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
