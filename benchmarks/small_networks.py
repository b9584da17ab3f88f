"""Small networks of scikit-learn on features of three text and two image datasets, and their logits.

tf-idf (200 components), or pixels (100 components); each a logistic regression, a network with one
hidden layer after 5 epochs, and after 40. A third of the training rows is the pool that calibration
rows are drawn from.
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
# The most rows of the parts.
_MOST = (12_000, 5_000)

Rows = tuple[NDArray[Any], NDArray[np.int64]]


def networks(
    data: Path, known: set[tuple[str, str]]
) -> Iterator[tuple[str, str, Rows, Rows]]:
    """Logits and labels of each network that is not known yet, of the pool and of the test rows."""
    for name in (*TEXTS, *IMAGES):
        wanted = [model for model in MODELS if (name, model) not in known]
        if not wanted:
            continue
        (inputs, labels), (test, test_labels) = features(data, name)
        order = np.random.default_rng(0).permutation(len(labels))
        third = len(labels) // 3
        pool = order[:third]
        train = order[third:]
        for model in wanted:
            fitted = MODELS[model]().fit(inputs[train], labels[train])
            assert len(fitted.classes_) == labels.max() + 1
            of_pool = logits_of(fitted, inputs[pool]), labels[pool]
            yield name, model, of_pool, (logits_of(fitted, test), test_labels)


def logits_of(fitted: Any, inputs: NDArray[Any]) -> NDArray[np.float64]:
    return np.log(np.maximum(fitted.predict_proba(inputs), 1e-30))


def features(data: Path, name: str) -> tuple[Rows, Rows]:
    """Features and labels of the training rows and of the test rows."""
    is_images = name in IMAGES
    parts = ("train.parquet", "test.parquet") if is_images else TEXTS[name]
    rng = np.random.default_rng(0)
    frames = []
    for part, most in zip(parts, _MOST, strict=True):
        path = data / name / part
        read = pd.read_parquet if path.suffix == ".parquet" else pd.read_csv
        frame = read(path)
        frames.append(frame.iloc[rng.permutation(len(frame))[:most]])
    train, test = frames
    reduce: Any = PCA(100, random_state=0)
    if is_images:
        train_inputs = stacked_pixels(train)
        test_inputs = stacked_pixels(test)
    else:
        words = TfidfVectorizer(max_features=20_000, sublinear_tf=True)
        train_inputs = words.fit_transform(train["text"].astype(str))
        test_inputs = words.transform(test["text"].astype(str))
        reduce = TruncatedSVD(200, random_state=0)
    classes, train_labels = np.unique(train["label"], return_inverse=True)
    reduce.fit(train_inputs)
    scale = StandardScaler().fit(reduce.transform(train_inputs))
    train_features = scale.transform(reduce.transform(train_inputs))
    # Classes that no training row has are left out.
    kept = np.flatnonzero(np.isin(test["label"], classes))
    test_labels = np.searchsorted(classes, test["label"].to_numpy()[kept])
    test_features = scale.transform(reduce.transform(test_inputs[kept]))
    return (
        (train_features, train_labels.astype(np.int64)),
        (test_features, test_labels.astype(np.int64)),
    )


def stacked_pixels(frame: pd.DataFrame) -> NDArray[np.float32]:
    column = "image" if "image" in frame else "img"
    return np.stack([pixels(cell) for cell in frame[column]])


def pixels(cell: Any) -> NDArray[np.float32]:
    contents = cell["bytes"] if isinstance(cell, dict) else cell
    image = Image.open(io.BytesIO(contents))
    return np.asarray(image, dtype=np.float32).reshape(-1) / 255
