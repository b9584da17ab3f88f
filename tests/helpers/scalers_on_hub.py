"""Scalers that are pushed to a Hub and loaded from there."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import transformers
from huggingface_hub import HfApi

import hf_calib
from hf_calib.scaling import IsotonicScaling, Scaler, SplineScaling, TemperatureScaling
from tests.helpers.hub_server import TOKEN
from tests.helpers.tiny import sequences, text_of, tiny_bert, tokenizer


def refusal(name: str, **settings: Any) -> str:
    try:
        Scaler.from_pretrained(name, **settings)
    except ValueError as error:
        return str(error)
    return ""


def claims(folder: Path) -> dict[str, bool]:
    """Statements that have to be true; at the end the Hub is offline."""
    found = {}
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=3, size=(300, 4))
    labels = (logits / 2 + rng.gumbel(size=logits.shape)).argmax(axis=1)
    spline, isotonic = SplineScaling().fit(logits, labels), IsotonicScaling().fit(logits, labels)
    temperature = TemperatureScaling().fit(logits, labels)

    spline.push_to_hub("me/scaler", token=TOKEN, private=True)
    loaded = SplineScaling.from_pretrained("me/scaler", token=TOKEN)
    found["bit-equal"] = bool((loaded.predict_proba(logits) == spline.predict_proba(logits)).all())
    temperature.push_to_hub("me/affine", token=TOKEN)
    found["of another class"] = "to hold a SplineScaling, got a TemperatureScaling" in refusal_of_spline()

    model = tiny_bert()
    model.save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    api = HfApi(token=TOKEN)
    for name in ("model", "plain", "broken"):
        api.create_repo(f"me/{name}")
        api.upload_folder(repo_id=f"me/{name}", folder_path=str(folder / "model"))
    api.create_branch("me/model", branch="joint")
    spline.push_to_hub("me/model", token=TOKEN)
    isotonic.push_to_hub("me/model", token=TOKEN, revision="joint")
    spline.push_to_hub("me/broken", token=TOKEN)
    api.upload_file(path_or_fileobj=b"old", path_in_repo="calibration.json", repo_id="me/broken")

    texts = [text_of(ids) for ids in sequences(model, 5)["input_ids"]]
    for name, revision, kind in (("main", None, SplineScaling), ("branch", "joint", IsotonicScaling)):
        classify: Any = hf_calib.pipeline("text-classification", "me/model", token=TOKEN, revision=revision)
        found[f"pipeline of {name}"] = type(classify.scaler) is kind and len(classify(texts)) == 5
    by_object = transformers.AutoModelForSequenceClassification.from_pretrained("me/model", token=TOKEN)
    classify = hf_calib.pipeline("text-classification", by_object, tokenizer=tokenizer(), token=TOKEN)
    found["pipeline of a model object"] = type(classify.scaler) is SplineScaling
    plain: Any = hf_calib.pipeline("text-classification", "me/plain", token=TOKEN)
    theirs = transformers.pipeline("text-classification", "me/plain", token=TOKEN)
    found["plain without a map"] = type(plain) is type(theirs) and plain(texts) == theirs(texts)
    try:
        hf_calib.pipeline("text-classification", "me/broken", token=TOKEN)
    except ValueError as error:
        found["broken is an error"] = "calibration.json to hold a fitted map" in str(error)

    for name, settings in (
        ("no repository", {"name": "me/nothing"}),
        ("no map", {"name": "me/plain"}),
        ("no revision", {"name": "me/scaler", "revision": "nothing"}),
    ):
        message = refusal(**settings, token=TOKEN)
        found[name] = "expected name to be a folder, or a repository on the Hub, with" in message
        found[f"{name}: no token"] = TOKEN not in message

    huggingface_hub.constants.HF_HUB_OFFLINE = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        classify = hf_calib.pipeline("text-classification", "me/model")
        found["offline, from the cache"] = type(classify.scaler) is SplineScaling
        found["offline, plain"] = not hasattr(hf_calib.pipeline("text-classification", "me/plain"), "scaler")
    return found


def refusal_of_spline() -> str:
    try:
        SplineScaling.from_pretrained("me/affine", token=TOKEN)
    except ValueError as error:
        return str(error)
    return ""
