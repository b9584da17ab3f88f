"""Every fitted scaler comes back from its files bit for bit, and no other file is taken for one."""

from __future__ import annotations

import json
import math
import tracemalloc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError

from hf_calib import scaling
from hf_calib._errors import InputError
from hf_calib.scaling import (
    FOLDABLE_SCALERS,
    PriorCorrection,
    Scaler,
    load_map,
    save_map,
)
from hf_calib.scaling.saved_map import (
    MAP_NAME,
    SavedMap,
    check_in_weights,
    config_record,
    fitted_numbers,
    has_bias,
    method_of,
    pooler_config,
    temperature_of,
    title_of,
)
from tests.helpers.hub_server import Hub
from tests.scaling.test_contract import MAKE, MULTI_LABEL, sampled

PRIORS = [0.25, 0.25, 0.25, 0.25], [4, 3, 2, 1]


@pytest.fixture(autouse=True)
def _let_them_warn() -> Iterator[None]:
    """Warnings about data that do not determine a scaler are tested in its own file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def fitted(name: str, n: int = 400, c: int = 4) -> tuple[Any, np.ndarray]:
    logits, labels = sampled(name, n, c)
    if name == "PriorCorrection":
        return PriorCorrection(*PRIORS), logits
    return MAKE[name]().fit(logits, labels), logits


def assert_same(loaded: Any, scaler: Any, logits: np.ndarray) -> None:
    assert type(loaded) is type(scaler)
    assert vars(loaded).keys() == {
        name for name in vars(scaler) if not name.startswith("_")
    }
    for name in vars(loaded):
        value, ours = getattr(scaler, name), getattr(loaded, name)
        if isinstance(value, np.ndarray):
            assert (ours.dtype, ours.shape, ours.tobytes()) == (
                value.dtype,
                value.shape,
                value.tobytes(),
            )
        elif name not in ("loss", "scaler"):
            assert ours == value
    ours, theirs = loaded.predict_proba(logits), scaler.predict_proba(logits)
    assert (ours.dtype, ours.tobytes()) == (theirs.dtype, theirs.tobytes())


def edited(folder: Path, **changes: Any) -> None:
    record = json.loads((folder / MAP_NAME).read_text())
    (folder / MAP_NAME).write_text(json.dumps({**record, **changes}))


def refused(folder: Path, message: str) -> None:
    with pytest.raises(
        ValueError,
        match=rf"calibration.json to hold a fitted calibrator, got .*{message}.*; save the calibrator",
    ):
        Scaler.from_pretrained(folder)


# The fits of AutoScaling on 100 classes take seconds, and are saved as those of what it chooses from.
CASES = [
    (name, c)
    for name in MAKE
    for c in (2, 100)
    if c == 2 or not name.startswith("AutoScaling")
]


@pytest.mark.parametrize(("name", "c"), CASES)
def test_every_scaler_comes_back_bit_for_bit(name: str, c: int, tmp_path: Path) -> None:
    scaler, logits = fitted(name, n=200, c=c)
    scaler.save_pretrained(tmp_path / "new")
    assert_same(Scaler.from_pretrained(tmp_path / "new"), scaler, logits)
    assert_same(type(scaler).from_pretrained(str(tmp_path / "new")), scaler, logits)
    files = {
        path.relative_to(tmp_path / "new").as_posix()
        for path in (tmp_path / "new").rglob("*.*")
    }
    assert files == {MAP_NAME}
    assert scaler.multi_label == (name in MULTI_LABEL)
    assert title_of(scaler)


@pytest.mark.parametrize("method", FOLDABLE_SCALERS)
def test_the_file_of_a_map_says_its_weight_and_bias(
    method: str, tmp_path: Path
) -> None:
    scaler, logits = fitted(FOLDABLE_SCALERS[method].name)
    save_map(scaler, tmp_path, {"split": "calibration", "n_examples": 300})
    loaded, about = load_map(tmp_path / MAP_NAME)
    assert about == {"split": "calibration", "n_examples": 300}
    assert (title_of(loaded), config_record(loaded)) == (
        title_of(scaler),
        config_record(scaler),
    )
    record = json.loads((tmp_path / MAP_NAME).read_text(), parse_constant=pytest.fail)
    assert {"hf_calib", "torch", "transformers", "scikit-learn"} == record[
        "versions"
    ].keys()
    weight, bias = np.array(record["weight"]), record["bias"]
    mapped = logits @ weight.T if weight.ndim == 2 else logits * weight
    np.testing.assert_allclose(
        mapped + (0 if bias is None else bias),
        scaler.transform(logits),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize(
    "name", ["TemperatureScaling", "VectorScaling", "StructuredMatrixScaling"]
)
def test_a_prior_correction_comes_back_with_the_map_before_it(
    name: str, tmp_path: Path
) -> None:
    first, logits = fitted(name)
    scaler = PriorCorrection(np.full(4, 0.25), np.array([4, 3, 2, 1]), first)
    save_map(scaler, tmp_path)
    loaded = load_map(tmp_path).scaler
    np.testing.assert_array_equal(
        loaded.predict_proba(logits), scaler.predict_proba(logits)
    )
    assert type(loaded.scaler) is type(first)
    assert title_of(loaded) == "prior correction"
    recorded = {"scaler": method_of(first, folds=True), **config_record(first)}
    priors = {"train_prior": [0.25] * 4, "target_prior": [0.4, 0.3, 0.2, 0.1]}
    assert config_record(loaded) == {**recorded, **priors}


# ---- What is recorded elsewhere ----


def test_the_hash_of_a_matrix_is_also_of_its_bias() -> None:
    scaler, _ = fitted("MatrixScaling")
    before = config_record(scaler)["sha256"]
    scaler.bias_ = scaler.bias_ + 1
    assert config_record(scaler)["sha256"] != before


def test_a_selected_temperature_is_one_as_long_as_there_is_no_bias() -> None:
    scaler, _ = fitted("AutoScaling")
    scaler.weight_ = np.array(0.5)
    scaler.bias_ = np.zeros(4)
    assert not has_bias(scaler)
    assert temperature_of(scaler) == 2
    scaler.bias_ = np.array([1.0, 0.0, 0.0, -1.0])
    assert has_bias(scaler)
    assert temperature_of(scaler) is None


def test_fitted_numbers_are_at_most_one_for_each_class() -> None:
    scaler, _ = fitted("MatrixScaling")
    assert fitted_numbers(scaler) == {"bias": scaler.bias_.tolist()}
    scaler, _ = fitted("TemperatureScaling")
    assert fitted_numbers(scaler) == {"temperature": scaler.temperature_}


def test_a_server_gets_the_mean_and_the_scale_of_one_logit() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(300, 1))
    labels = (rng.logistic(size=(300, 1)) < 2 * logits - 1).astype(int)
    scaler = scaling.StructuredVectorScaling(multi_label=True).fit(logits, labels)
    config = pooler_config(scaler)
    assert config is not None
    scaled = (logits - config["logit_mean"]) / config["logit_sigma"]
    np.testing.assert_allclose(scaled, scaler.transform(logits), rtol=1e-12)
    scaler.weight_ = np.zeros(1)
    assert pooler_config(scaler) is None
    assert pooler_config(fitted("VectorScaling")[0]) is None


def test_a_file_beside_folded_weights_is_compared_with_what_the_config_says() -> None:
    saved = SavedMap(fitted("TemperatureScaling")[0], {})
    check_in_weights(saved, {"method": "temperature"}, "here")
    check_in_weights(None, {"method": "vector"}, "here")
    check_in_weights(SavedMap(fitted("SplineScaling")[0], {}), {}, "here")
    with pytest.raises(InputError, match=r"json in here to be of .*, got temperature "):
        check_in_weights(saved, {"temperature": 7.0}, "here")


def test_a_calibrator_is_of_the_revision_that_is_named(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache")
    )
    saved = []
    for seed in (0, 1):
        logits, labels = sampled("TemperatureScaling", 400 + seed, 4)
        scaler = scaling.TemperatureScaling().fit(logits, labels)
        scaler.save_pretrained(tmp_path)
        saved.append({MAP_NAME: (tmp_path / MAP_NAME).read_bytes()})
    assert saved[0] != saved[1]
    hub.files["me/map"] = {"main": saved[0], "newer": saved[1]}
    found = Scaler.from_pretrained("me/map", revision="newer")
    assert found.temperature_ == scaler.temperature_


def test_bins_of_many_equal_probabilities_come_back(tmp_path: Path) -> None:
    logits = np.log(np.repeat([[0.9, 0.1], [0.6, 0.4]], [50, 10], axis=0))
    scaler = scaling.HistogramBinning(5, binning="equal_mass")
    scaler.fit(logits, np.repeat([0, 1], [40, 20]))
    assert scaler.edges_[0, 1] == scaler.edges_[0, 2]
    scaler.save_pretrained(tmp_path)
    assert_same(Scaler.from_pretrained(tmp_path), scaler, logits)


def test_another_class_is_refused(tmp_path: Path) -> None:
    scaler, logits = fitted("IsotonicScaling")
    scaler.save_pretrained(tmp_path)
    message = r"to hold a SplineScaling, got a IsotonicScaling; use IsotonicScaling.from_pretrained"
    with pytest.raises(ValueError, match=message):
        scaling.SplineScaling.from_pretrained(tmp_path)
    assert_same(scaling.IsotonicScaling.from_pretrained(tmp_path), scaler, logits)


@pytest.mark.parametrize("name", MAKE)
def test_what_is_not_fitted_is_not_saved(name: str, tmp_path: Path) -> None:
    with pytest.raises(NotFittedError):
        MAKE[name]().save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_is_no_scaler_or_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=r"expected scaler to be one of TemperatureScaling, .*got float"
    ):
        save_map(1.5, tmp_path)
    for name, attribute in (
        ("VectorScaling", "bias_"),
        ("SplineScaling", "accuracies_"),
    ):
        scaler, _ = fitted(name)
        setattr(scaler, attribute, getattr(scaler, attribute) * np.nan)
        message = (
            rf"expected {attribute[:-1]} to be float in .*, got nan.* fit it again"
        )
        with pytest.raises(ValueError, match=message):
            save_map(scaler, tmp_path)
    assert not list(tmp_path.iterdir())


DAMAGES: list[tuple[str, dict[str, Any], str]] = [
    ("VectorScaling", {"method": "vectors"}, r"got 'vectors'; did you mean 'vector'\?"),
    ("VectorScaling", {"method": "grouped"}, "left hf_calib, whose commit ea73cc2d re"),
    ("VectorScaling", {"weight": "large"}, "weight to be float in"),
    ("SplineScaling", {"parameters": {}}, "parameters to be n_classes, sc"),
    (
        "EnsembleTemperatureScaling",
        {"parameters": {"n_classes": 4, "temperature": 1e999, "weights": [1, 0, 0]}},
        "temperature to be float in .*, got inf",
    ),
    ("VectorScaling", {"method": "inverse_link"}, "whose commit ea73cc2d reads the f"),
]


@pytest.mark.parametrize(("name", "changes", "message"), DAMAGES)
def test_entries_that_no_fit_finds_are_refused(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    fitted(name)[0].save_pretrained(tmp_path)
    edited(tmp_path, **changes)
    refused(tmp_path, message)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, "No such file")
    for text in ("[1]", "null", "3", '"x"'):
        (tmp_path / MAP_NAME).write_text(text)
        refused(tmp_path, "calibration.json to hold a JSON object, got")
    (tmp_path / MAP_NAME).write_text("{}")
    refused(tmp_path, "")
    (tmp_path / MAP_NAME).write_text('{"settings": {}}')
    refused(tmp_path, "expected method to be a scaler, got None")
    for text in ("[" * 100_000, '{"method": "spline"', "\udc80", "{", "[1]"):
        (tmp_path / MAP_NAME).write_bytes(text.encode("utf-8", "surrogateescape"))
        refused(tmp_path, "a file that cannot be read")


def test_many_small_values_are_refused_before_they_take_memory(tmp_path: Path) -> None:
    text = '{"about": [' + "[]," * 1_000_000 + "0]}"
    (tmp_path / MAP_NAME).write_text(text)
    tracemalloc.start()
    try:
        refused(tmp_path, "1,000,00. lists and objects")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 3 * len(text)


# ---- What is said about a calibrator ----


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"method": "x"}, "about to leave method to the calibrator"),
        ({"weight": 3, "bias": 4, "split": "a"}, "about to leave bias, weight to the"),
        ({"date": "today"}, "about to leave date to"),
        ({"versions": {}}, "about to leave versions to"),
        ({"score": math.nan}, "about to hold finite numbers, texts"),
        ({"score": np.float32("nan")}, "about to hold finite numbers, texts"),
        ({"score": [np.float64("inf")]}, "about to hold finite numbers, texts"),
        ({"score": np.zeros(2)}, "about to hold finite numbers, texts"),
        ({"score": {1, 2}}, "about to hold finite numbers, texts"),
        ({"score": object()}, "about to hold finite numbers, texts"),
        ({(1, 2): 3}, "about to hold finite numbers, texts"),
        ({"criterion": "zzz"}, "hold a valid 'criterion', got 'zzz'"),
        ({"n_examples": -3}, "hold a valid 'n_examples', got -3"),
        ({"n_examples": 10**400}, "hold a valid 'n_examples'"),
        ({"fingerprint": "abc"}, "hold a valid 'fingerprint'"),
        ({"temperature": 1e30}, r"hold a valid 'temperature', got 1e\+30"),
        ({"temperatures": [1.0, 1e-30]}, "hold a valid 'temperatures'"),
        ({"data": {"train": None}}, "hold a valid 'data'"),
        (3, "about to be a mapping"),
    ],
)
def test_what_cannot_be_loaded_is_not_saved(
    about: Any, message: str, tmp_path: Path
) -> None:
    scaler, _ = fitted("TemperatureScaling")
    with pytest.raises(InputError, match=message):
        save_map(scaler, tmp_path, about)
    assert not list(tmp_path.iterdir())


def test_endless_entries_are_not_saved(tmp_path: Path) -> None:
    scaler, _ = fitted("TemperatureScaling")
    about: dict[str, Any] = {}
    about["about"] = about
    with pytest.raises(InputError, match="about to hold finite numbers, texts"):
        save_map(scaler, tmp_path, about)
    assert not list(tmp_path.iterdir())


def test_scalars_of_numpy_are_saved_as_numbers(tmp_path: Path) -> None:
    scaler, _ = fitted("TemperatureScaling")
    about = {"n_examples": np.int64(3), "score": np.float32(0.5), "ok": np.bool_(True)}
    save_map(scaler, tmp_path, about)
    assert load_map(tmp_path).about == {"n_examples": 3, "score": 0.5, "ok": True}


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("TemperatureScaling", "criterion", "zzz"),
        ("TemperatureScaling", "n_bins", 1.5),
        ("TemperatureScaling", "more", 1),
        ("HistogramBinning", "binning", "zzz"),
        ("IsotonicScaling", "multiclass", "zzz"),
    ],
)
def test_settings_that_no_calibrator_has_are_neither_loaded_nor_saved(
    name: str, setting: str, value: Any, tmp_path: Path
) -> None:
    scaler, _ = fitted(name)
    save_map(scaler, tmp_path)
    settings = {**scaler.get_params(), setting: value}
    edited(tmp_path, settings=settings)
    unknown = f"unexpected keyword argument '{setting}'"
    refused(tmp_path, unknown if setting == "more" else f"expected {setting} to be")
    if setting != "more":
        setattr(scaler, setting, value)
        with pytest.raises(InputError, match=f"expected {setting} to be"):
            save_map(scaler, tmp_path / "new")


@pytest.mark.parametrize("value", [0.0, -1.0, 1e30, 1e-30, math.nan, "2", None, [1.0]])
def test_a_temperature_that_no_fit_finds_is_neither_used_nor_saved(
    value: Any, tmp_path: Path
) -> None:
    scaler, logits = fitted("TemperatureScaling")
    scaler.temperature_ = value
    for use in (scaler.transform, scaler.predict_proba, scaler.predict):
        with pytest.raises(InputError, match=r"expected .*temperature to be float in"):
            use(logits)
    with pytest.raises(InputError):
        save_map(scaler, tmp_path)
    mixture, logits = fitted("EnsembleTemperatureScaling")
    mixture.temperature_ = value
    with pytest.raises(InputError, match="expected temperature to be float in"):
        mixture.predict_proba(logits)
    several, logits = fitted("PerLabelTemperatureScaling")
    several.temperatures_ = np.array([1.0, 1.0, 1.0, 0.0])
    with pytest.raises(InputError, match="expected temperatures to be float in"):
        several.predict_proba(logits)


def test_a_place_that_is_none(tmp_path: Path) -> None:
    scaler, _ = fitted("TemperatureScaling")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"expected output to be writable"):
        scaler.save_pretrained(tmp_path / "file")
    for name in (tmp_path / "nothing", "../nothing", "a/b/c"):
        with pytest.raises(
            ValueError,
            match="expected name to be a folder, or a repository on the Hub, with",
        ):
            Scaler.from_pretrained(name)
