"""Small networks of scikit-learn on features of three text and two image datasets, and their logits.

tf-idf (200 components), or pixels (100 components); each a logistic regression, a network with one hidden layer after 5
epochs, and after 40. A third of the training rows is the pool that calibration rows are drawn from.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from PIL import Image
from sklearn.decomposition import PCA, TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler

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


def networks(
    data: Path, known: set[tuple[str, str]]
) -> Iterator[tuple[str, str, Rows, Rows]]:
    """Logits and labels of each network that is not known yet, of the pool and of the test rows."""
    for name in (*TEXTS, *IMAGES):
        wanted = {
            model: make for model, make in MODELS.items() if (name, model) not in known
        }
        if not wanted:
            continue
        (x, y), (test_x, test_y) = features(data, name)
        order = np.random.default_rng(0).permutation(len(y))
        pool, train = order[: len(y) // 3], order[len(y) // 3 :]
        for model, make in wanted.items():
            fitted = make().fit(x[train], y[train])
            assert len(fitted.classes_) == y.max() + 1
            logits = [
                np.log(np.maximum(fitted.predict_proba(rows), 1e-30))
                for rows in (x[pool], test_x)
            ]
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
            sets.append(
                (
                    np.stack([pixels(cell) for cell in frame[column]]),
                    frame["label"].to_numpy(),
                )
            )
        reduce: Any = PCA(100, random_state=0)
    else:
        sets = []
        for part, most in zip(TEXTS[name], (_MOST_TRAIN, _MOST_TEST), strict=True):
            path = data / name / part
            frame = (
                pd.read_parquet(path)
                if path.suffix == ".parquet"
                else pd.read_csv(path)
            )
            frame = frame.iloc[rng.permutation(len(frame))[:most]]
            labels = frame["label"].to_numpy()
            sets.append((frame["text"].astype(str).to_numpy(), labels))
        vectorizer = TfidfVectorizer(max_features=20_000, sublinear_tf=True).fit(
            sets[0][0]
        )
        sets = [(vectorizer.transform(texts), labels) for texts, labels in sets]
        reduce = TruncatedSVD(200, random_state=0)
    names = np.unique(sets[0][1])
    reduce.fit(sets[0][0])
    scale = StandardScaler().fit(reduce.transform(sets[0][0]))
    found = []
    for rows, labels in sets:
        kept = np.isin(labels, names)
        numbers = np.searchsorted(names, labels[kept]).astype(np.int64)
        found.append(
            (scale.transform(reduce.transform(rows[np.flatnonzero(kept)])), numbers)
        )
    return found[0], found[1]


def pixels(cell: Any) -> NDArray[np.float32]:
    image = Image.open(io.BytesIO(cell["bytes"] if isinstance(cell, dict) else cell))
    return np.asarray(image, dtype=np.float32).reshape(-1) / 255
