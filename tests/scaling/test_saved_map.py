"""A fitted map comes back from its file bit for bit, and no other file is taken for one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_calib.scaling import (
    IsotonicScaling,
    PriorCorrection,
    TemperatureScaling,
    VectorScaling,
    load_map,
    save_map,
)
from hf_calib.scaling.methods import FOLDABLE_SCALERS, foldable_method
from hf_calib.scaling.saved_map import MAP_NAME, config_record, temperature_of, title_of

rng = np.random.default_rng(0)
LOGITS = rng.normal(scale=3, size=(300, 4))
LABELS = (LOGITS / 2 + [0, 0, 1, 0] + rng.gumbel(size=LOGITS.shape)).argmax(axis=1)
MULTI_LABELS = (rng.random(LOGITS.shape) < 1 / (1 + np.exp(-LOGITS / 2))).astype(int)


def fitted(method: str) -> Any:
    entry = FOLDABLE_SCALERS[method]
    if entry.needs == "priors":
        return entry.load()([0.25, 0.25, 0.25, 0.25], [4, 3, 2, 1])
    return entry.load()().fit(LOGITS, MULTI_LABELS if entry.needs == "label_matrix" else LABELS)


@pytest.mark.parametrize("method", FOLDABLE_SCALERS)
def test_every_map_comes_back_bit_for_bit(method: str, tmp_path: Path) -> None:
    scaler = fitted(method)
    save_map(scaler, tmp_path, {"split": "calibration", "n_examples": 300})
    loaded, about = load_map(tmp_path / MAP_NAME)
    assert about == {"split": "calibration", "n_examples": 300}
    assert type(loaded) is type(scaler)
    assert loaded.get_params() == scaler.get_params()
    public = {name for name in vars(scaler) if not name.startswith("_")}
    assert vars(loaded).keys() == public
    for ours, theirs in zip(loaded.affine_map(), scaler.affine_map(), strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or (ours.dtype, ours.tobytes()) == (theirs.dtype, theirs.tobytes())
    np.testing.assert_array_equal(loaded.predict_proba(LOGITS), scaler.predict_proba(LOGITS))
    np.testing.assert_array_equal(loaded.transform(LOGITS), scaler.transform(LOGITS))
    assert (title_of(loaded), config_record(loaded)) == (title_of(scaler), config_record(scaler))
    record = json.loads((tmp_path / MAP_NAME).read_text(), parse_constant=pytest.fail)
    weight, bias = np.array(record["weight"]), record["bias"]
    mapped = LOGITS @ weight.T if weight.ndim == 2 else LOGITS * weight
    np.testing.assert_allclose(
        mapped + (0 if bias is None else bias), scaler.transform(LOGITS), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("method", ["temperature", "vector", "structured_matrix"])
def test_a_prior_correction_comes_back_with_the_map_before_it(method: str, tmp_path: Path) -> None:
    first = fitted(method)
    scaler = PriorCorrection(np.full(4, 0.25), np.array([4, 3, 2, 1]), first)
    save_map(scaler, tmp_path)
    loaded = load_map(tmp_path).scaler
    np.testing.assert_array_equal(loaded.predict_proba(LOGITS), scaler.predict_proba(LOGITS))
    assert type(loaded.scaler) is type(first)
    assert title_of(loaded) == "prior correction"
    recorded = {"scaler": method, **config_record(first)}
    priors = {"train_prior": [0.25] * 4, "target_prior": [0.4, 0.3, 0.2, 0.1]}
    assert config_record(loaded) == {**recorded, **priors}
    record = json.loads((tmp_path / MAP_NAME).read_text())
    record["settings"]["target_prior"] = [1, 2, 3, 4]
    (tmp_path / MAP_NAME).write_text(json.dumps(record))
    with pytest.raises(ValueError, match="parameters of 'prior_correction' that are not those of its weight"):
        load_map(tmp_path)


def test_settings_and_subclasses_come_back(tmp_path: Path) -> None:
    class Mine(TemperatureScaling):
        pass

    scaler = Mine("ece", grid=np.array([0.5, 2.0]), n_bins=10).fit(LOGITS, LABELS)
    assert foldable_method(scaler) == "temperature"
    save_map(scaler, tmp_path / "map.json")
    loaded = load_map(tmp_path / "map.json").scaler
    assert loaded.get_params() == {"criterion": "ece", "grid": [0.5, 2.0], "n_bins": 10, "multi_label": False}
    assert temperature_of(loaded) == scaler.temperature_


def test_what_is_no_scaler_or_is_not_finite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"expected scaler to be one of TemperatureScaling, .*got float"):
        save_map(1.5, tmp_path)
    with pytest.raises(ValueError, match=r"expected path to be a folder or calibration.json, got .*map.json"):
        save_map(IsotonicScaling().fit(LOGITS, LABELS), tmp_path / "map.json")
    scaler = VectorScaling().fit(LOGITS, LABELS)
    scaler.bias_ = scaler.bias_ * np.nan
    with pytest.raises(
        ValueError, match="expected scaler to have finite numbers, got NaN or infinity; fit it"
    ):
        save_map(scaler, tmp_path)
    assert not list(tmp_path.iterdir())


DAMAGES: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"method": "vectors"}, r"got method 'vectors' \(did you mean 'vector'\?\)"),
    "methods": ({"method": ["vector"]}, r"got method \['vector'\]"),
    "not foldable": (
        {"method": "isotonic"},
        "parameters to be frequencies, knots, n_classes, sizes, got none",
    ),
    "settings": ({"settings": {"criterion": "nll"}}, "got 'vector' with entries missing or of another kind"),
    "no bias": ({"bias": None}, "got 'vector' with entries missing or of another kind"),
    "shape": ({"bias": [0.0, 1.0]}, "got 'vector' with entries missing or of another kind"),
    "words": ({"weight": "large"}, "got 'vector' with entries missing or of another kind"),
    "not finite": ({"weight": [1.0, float("nan"), 1.0, 1.0]}, "NaN or infinity"),
    "a class": (
        {"parameters": {"_class": 1}, "weight": None},
        "NaN or infinity|entries missing|parameters of",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_gets_one_clear_error(damage: str, tmp_path: Path) -> None:
    save_map(fitted("vector"), tmp_path)
    file = tmp_path / MAP_NAME
    changes, message = DAMAGES[damage]
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(
        ValueError, match=rf"calibration.json to hold a fitted map, .*({message}).*; save the map"
    ):
        load_map(tmp_path)


def test_a_temperature_that_is_not_that_of_the_weight_is_refused(tmp_path: Path) -> None:
    save_map(fitted("temperature"), tmp_path)
    file = tmp_path / MAP_NAME
    file.write_text(json.dumps({**json.loads(file.read_text()), "parameters": {"temperature": 2.0}}))
    with pytest.raises(ValueError, match="got parameters of 'temperature' that are not those of its weight"):
        load_map(tmp_path)


def test_a_weight_that_would_overflow_is_refused(tmp_path: Path) -> None:
    save_map(fitted("vector"), tmp_path)
    record = json.loads((tmp_path / "calibration.json").read_text())
    record["weight"][0] = 1e308
    (tmp_path / "calibration.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"have numbers up to 1e\+12"):
        load_map(tmp_path)


def test_a_link_to_somebody_elses_folder_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/scaler.safetensors").write_text("mine")
    (tmp_path / "m").mkdir()
    (tmp_path / "m/calibration").symlink_to(tmp_path / "mine")
    isotonic = IsotonicScaling().fit([[1.0, 0.0], [0.0, 1.0]] * 5, [0, 1] * 5)
    with pytest.raises(ValueError, match="calibration to be a folder of its own, got a link to"):
        save_map(isotonic, tmp_path / "m")
    save_map(fitted("temperature"), tmp_path / "m")  # which has nothing to write there
    assert (tmp_path / "mine/scaler.safetensors").read_text() == "mine"


def test_what_is_no_such_file_gets_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"calibration.json to hold a fitted map, got a file that cannot be read"
    ):
        load_map(tmp_path)
    for text, message in (("{", "a file that cannot be read"), ("[1]", "something else than a JSON object")):
        (tmp_path / MAP_NAME).write_text(text)
        with pytest.raises(ValueError, match=f"to hold a fitted map, got {message}"):
            load_map(tmp_path)
