"""Parameters that no fit can find are neither loaded nor saved, whatever a calibration.json says."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_calib import InputError
from hf_calib.scaling import PriorCorrection, Scaler, save_map
from hf_calib.scaling.saved_map import MAP_NAME
from tests.scaling.test_contract import MAKE, fitted, sampled

NAN, INF = float("nan"), float("inf")
NAMES = list(MAKE)
MORE = ("PriorCorrection", "PriorCorrection-vector")


@pytest.fixture(autouse=True)
def _let_them_warn() -> Iterator[None]:
    """Warnings about data that do not determine a scaler are tested in its own file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def make(name: str) -> Any:
    if name.startswith("PriorCorrection"):
        first = fitted("VectorScaling") if name.endswith("vector") else None
        return PriorCorrection([0.25] * 4, [4, 3, 2, 1], first)
    return fitted(name)


@pytest.fixture(scope="session")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The records of the files of all scalers, of four classes."""
    folder = tmp_path_factory.mktemp("records")
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for name in (*NAMES, *MORE):
            save_map(make(name), folder)
            found[name] = json.loads((folder / MAP_NAME).read_text())
    return found


def load(record: dict[str, Any], folder: Path) -> Any:
    (folder / MAP_NAME).write_text(json.dumps(record))
    return Scaler.from_pretrained(folder)


def refused(record: dict[str, Any], folder: Path, message: str = "") -> None:
    match = rf"calibration.json to hold a fitted calibrator, got .*{message}.*; save"
    with pytest.raises(ValueError, match=match):
        load(record, folder)


TEMPERATURES = (-1, 0, 1e-300, 1e300, 9e-6, 1.1e5, [1.5], [], True, "2", None, NAN, INF)
SHARES = (1.5, -0.5, NAN, INF, "0.5", None, True, [0.5])
NUMBERS = (NAN, INF, 1e300, -1e300, "1", None, True, [1.0])
# For each scaler the parameters, and what stands in place of the whole or, with "*", of one number.
RANGES: list[tuple[str, str, tuple[Any, ...]]] = [
    ("TemperatureScaling", "temperature", TEMPERATURES),
    ("TemperatureScaling-ece", "temperature", TEMPERATURES),
    ("TemperatureScaling-multi_label", "temperature", TEMPERATURES),
    ("PerLabelTemperatureScaling", "shared_temperature", TEMPERATURES),
    ("PerLabelTemperatureScaling", "*temperatures", TEMPERATURES),
    ("PerLabelTemperatureScaling", "temperatures", (2.0, [], [2.0] * 3, [[2.0] * 4])),
    (
        "EnsembleTemperatureScaling",
        "temperature",
        (*TEMPERATURES[:4], *TEMPERATURES[6:]),
    ),
    ("EnsembleTemperatureScaling", "*weights", SHARES),
    ("EnsembleTemperatureScaling", "weights", ([0.5, 0.5], [0.5] * 3, [0.25] * 4, 1.0)),
    ("HistogramBinning", "*frequencies", SHARES),
    ("HistogramBinning", "*edges", SHARES),
    ("HistogramBinning", "edges", ([[0.0, 0.5, 1.0]] * 4, [0.0, 1.0], [])),
    ("IsotonicScaling", "*frequencies", SHARES),
    ("IsotonicScaling", "*knots", SHARES),
    ("IsotonicScaling", "sizes", ([1, 1, 1, 1], [-1, 2, 3, 4], [4], 4, [], [1.5] * 4)),
    ("IsotonicScaling-joint", "sizes", ([], [0], [10**6], [2, 2], [10**30])),
    ("SplineScaling", "*scores", SHARES),
    ("SplineScaling", "*accuracies", SHARES),
    ("SplineScaling", "accuracies", ([0.5], [], 0.5)),
    ("DirichletScaling", "*bias", NUMBERS),
    ("DirichletScaling", "bias", ([0.0] * 3, [[0.0] * 4], 0.0, [])),
    ("DirichletScaling", "weight", ([[1.0] * 4] * 3, [1.0] * 4, 1.0, [])),
    ("AutoScaling", "choice", (1, None, "<b>", "a\x1b[2J", "x" * 1_000, ["auto"])),
    ("AutoScaling", "results", (None, "x", [1], {"a": 1}, [{"nll": [1]}])),
    *(
        (
            name,
            "n_classes",
            (-1, 0, 1, 3, 5, 4.0, 4.5, "4", True, [4], None, 10**12, NAN),
        )
        for name in ("HistogramBinning", "IsotonicScaling")
    ),
    *(
        (name, "n_classes", (-1, 0, 1, 4.5, "4", True, [4], None, 10**9, 10**30))
        for name in (
            "SplineScaling",
            "EnsembleTemperatureScaling",
            "IsotonicScaling-joint",
        )
    ),
]


def with_first(values: Any, value: Any) -> Any:
    """The nested list with another first number."""
    if not isinstance(values, list):
        return value
    return [with_first(values[0], value), *values[1:]]


@pytest.mark.parametrize(("name", "parameter", "values"), RANGES)
def test_parameters_out_of_their_range_are_not_loaded(
    name: str,
    parameter: str,
    values: tuple[Any, ...],
    records: dict[str, dict[str, Any]],
    tmp_path: Path,
) -> None:
    key = parameter.removeprefix("*")
    for value in values:
        record = copy.deepcopy(records[name])
        before = record["parameters"][key]
        new = with_first(before, value) if parameter.startswith("*") else value
        record["parameters"][key] = new
        refused(record, tmp_path)
    load(records[name], tmp_path)


@pytest.mark.parametrize(
    "name", ["VectorScaling", "MatrixScaling", "StructuredMatrixScaling", "AutoScaling"]
)
def test_weights_and_biases_out_of_their_range_are_not_loaded(
    name: str, records: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    for key in ("weight", "bias"):
        of_others = ([], [1.0], [1.0] * 3, [[1.0] * 4], [[1.0] * 4] * 3, "1", {})
        first = [with_first(records[name][key], value) for value in NUMBERS]
        for value in (*first, *of_others, None):
            # The weight of a temperature goes with any number of classes.
            if (name, key, value) != ("AutoScaling", "bias", [1.0] * 3):
                refused({**records[name], key: value}, tmp_path)


@pytest.mark.parametrize(
    ("name", "parameter", "places"),
    [
        ("HistogramBinning", "edges", (0,)),
        ("IsotonicScaling", "knots", ()),
        ("IsotonicScaling", "frequencies", ()),
        ("SplineScaling", "scores", ()),
    ],
)
def test_numbers_that_do_not_rise_are_not_loaded(
    name: str,
    parameter: str,
    places: tuple[int, ...],
    records: dict[str, dict[str, Any]],
    tmp_path: Path,
) -> None:
    record = copy.deepcopy(records[name])
    values = record["parameters"][parameter]
    for place in places:
        values = values[place]
    values[1], values[4] = values[4], values[1]
    refused(record, tmp_path, parameter)


@pytest.mark.parametrize("name", [*NAMES, *MORE])
def test_the_map_is_that_of_the_parameters(
    name: str, records: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """A T that contradicts the weight which is folded, for example."""
    record = records[name]
    if record.get("weight") is None:
        return
    stated_alone = record["parameters"].keys() - {"weight", "bias", "choice", "results"}
    for key in ("weight", "bias"):
        if stated_alone or name.startswith("PriorCorrection"):
            other = (1.01 * np.array(record[key] or 0.5)).tolist()
            refused({**record, key: other}, tmp_path, "weight and bias")
        without = {k: v for k, v in record.items() if k != key}
        refused(without, tmp_path)
    if "temperature" in record["parameters"]:
        for other in (3.0, record["parameters"]["temperature"] * 1.001):
            refused(
                {**record, "parameters": {"temperature": other}}, tmp_path, "weight"
            )


@pytest.mark.parametrize("name", [*NAMES, *MORE])
def test_parameters_that_are_missing_or_unknown_are_not_loaded(
    name: str, records: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    record = records[name]
    for key in record["parameters"]:
        others = {k: v for k, v in record["parameters"].items() if k != key}
        refused({**record, "parameters": others}, tmp_path)
    for key in ("more", "__class", "__dict_", "", "_n_seen"):
        more = {**record["parameters"], key: 1.0}
        refused({**record, "parameters": more}, tmp_path)
    for parameters in (None, [], "x", 1):
        refused({**record, "parameters": parameters}, tmp_path)


@pytest.mark.parametrize(
    ("name", "key", "values"),
    [
        ("TemperatureScaling", "multi_label", ("no", 0, 1, None, [])),
        ("AutoScaling", "multi_label", ("no", 1, None)),
        ("StructuredVectorScaling", "multi_label", ("no", 1, None)),
        ("TemperatureScaling", "criterion", ([], 1, {"a": 1}, "<b>")),
        ("TemperatureScaling", "grid", ({}, [[1.0]], ["a"], [NAN])),
        ("TemperatureScaling", "n_bins", ([[]], {}, NAN)),
        ("TemperatureScaling", "scaler", (None, 1)),
        ("HistogramBinning", "n_bins", (0, 10**6)),
        ("SplineScaling", "n_knots", (3, None)),
        ("MatrixScaling", "bias_penalty", (-1, "0.5", NAN)),
        ("StructuredVectorScaling", "penalty", (0, None, [1.0])),
        ("AutoScaling", "n_folds", (1, 2.5)),
        ("AutoScaling", "random_state", (-1, None)),
        (
            "PriorCorrection",
            "target_prior",
            ([1, 0, 1, 1], [1, 2], [NAN] * 4, "x", None),
        ),
        ("PriorCorrection", "scaler", (1, "x", {}, {"method": "temperature"})),
    ],
)
def test_settings_that_no_fit_takes_are_not_loaded(
    name: str,
    key: str,
    values: tuple[Any, ...],
    records: dict[str, dict[str, Any]],
    tmp_path: Path,
) -> None:
    for value in values:
        given = {**records[name]["settings"], key: value}
        refused({**records[name], "settings": given}, tmp_path)


def test_a_prior_correction_of_a_scaler_of_other_classes_is_not_loaded(
    records: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    record = copy.deepcopy(records["PriorCorrection-vector"])
    inner = record["settings"]["scaler"]
    for weight, bias in (([1.0], [0.0]), ([1.0] * 3, [0.0] * 3)):
        record["settings"]["scaler"] = {**inner, "weight": weight, "bias": bias}
        refused(record, tmp_path)


def test_files_that_are_too_large_are_not_read(tmp_path: Path) -> None:
    with (tmp_path / MAP_NAME).open("wb") as file:
        file.truncate(2**28 + 1)
    with pytest.raises(ValueError, match="at most 268,435,456 bytes, got 268,435,457"):
        Scaler.from_pretrained(tmp_path)


def test_what_no_fit_finds_is_not_saved(tmp_path: Path) -> None:
    changes: list[tuple[str, str, Any]] = [
        ("TemperatureScaling", "temperature_", -1.0),
        ("TemperatureScaling", "temperature_", np.array([1.5])),
        ("IsotonicScaling", "frequencies_", fitted("IsotonicScaling").frequencies_ + 2),
        ("VectorScaling", "weight_", np.ones(3)),
        ("VectorScaling", "bias_", np.full(4, 1e20)),
    ]
    for name, attribute, value in changes:
        scaler = copy.deepcopy(fitted(name))
        setattr(scaler, attribute, value)
        with pytest.raises(
            ValueError, match=r"expected (weight|bias|temperature|frequencies) to be"
        ):
            scaler.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


PLACES = st.lists(st.integers(0, 10**6), min_size=1, max_size=4)
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
    st.lists(st.floats(0, 1), max_size=5), st.just({}), st.just([[]]),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, *MORE])
@settings(
    max_examples=15,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(places=PLACES, value=ODD)
def test_any_other_value_is_refused_or_gives_probabilities(
    name: str,
    places: list[int],
    value: Any,
    records: dict[str, dict[str, Any]],
    tmp_path: Path,
) -> None:
    """At any place of the record: no other error, no NaN, and nothing outside [0, 1]."""
    record = copy.deepcopy(records[name])
    parent: Any = {k: v for k, v in record.items() if k not in ("date", "versions")}
    whole = parent
    for depth, place in enumerate(places):
        keys = sorted(parent) if isinstance(parent, dict) else range(len(parent))
        key = list(keys)[place % len(keys)]
        child = parent[key]
        if depth + 1 == len(places) or not isinstance(child, dict | list) or not child:
            parent[key] = value
            break
        parent = child
    try:
        scaler = load(whole, tmp_path)
    except InputError:
        return
    probs = scaler.predict_proba(sampled("VectorScaling")[0][:20, :4])
    assert ((probs >= 0) & (probs <= 1)).all()
