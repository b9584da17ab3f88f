"""Every fitted scaler comes back from its folder bit for bit, and no other folder is taken for one."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

import hf_calib.scaling.saved_map as saved_map
from hf_calib import scaling
from hf_calib.losses import make_loss
from hf_calib.scaling import SCALERS, Scaler
from hf_calib.scaling.methods import method_of
from hf_calib.scaling.saved_map import ARRAYS_NAME, MAP_NAME, is_multi_label, title_of
from tests.scaling.test_contract import MAKE, MULTI_LABEL, sampled


@pytest.fixture(autouse=True)
def _let_them_warn() -> Iterator[None]:
    """Warnings about data that do not determine a scaler are tested in its own file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def fitted(name: str, n: int = 400, c: int = 4) -> tuple[Any, np.ndarray]:
    logits, labels = sampled(name, n, c)
    return MAKE[name]().fit(logits, labels), logits


def assert_same(loaded: Any, scaler: Any, logits: np.ndarray) -> None:
    assert type(loaded) is type(scaler)
    public = {name for name in vars(scaler) if not name.startswith("_")}
    assert vars(loaded).keys() == public
    for name in vars(loaded):
        value = getattr(scaler, name)
        ours = getattr(loaded, name)
        if isinstance(value, np.ndarray):
            assert (ours.dtype, ours.shape, ours.tobytes()) == (value.dtype, value.shape, value.tobytes())
        elif name != "loss":
            assert ours == value
    ours, theirs = loaded.predict_proba(logits), scaler.predict_proba(logits)
    assert (ours.dtype, ours.tobytes()) == (theirs.dtype, theirs.tobytes())


# The fits of AutoScaling on 100 classes take seconds, and are saved as those of what it chooses from.
CASES = [(name, c) for name in MAKE for c in (2, 100) if c == 2 or not name.startswith("AutoScaling")]


@pytest.mark.parametrize(("name", "c"), CASES)
def test_every_scaler_comes_back_bit_for_bit(name: str, c: int, tmp_path: Path) -> None:
    scaler, logits = fitted(name, n=200, c=c)
    scaler.save_pretrained(tmp_path / "new")
    assert_same(Scaler.from_pretrained(tmp_path / "new"), scaler, logits)
    assert_same(type(scaler).from_pretrained(str(tmp_path / "new")), scaler, logits)
    files = {path.relative_to(tmp_path / "new").as_posix() for path in (tmp_path / "new").rglob("*.*")}
    arrays = not SCALERS[method_of(scaler)].foldable and method_of(scaler) != "inverse_link"
    assert files == ({MAP_NAME, ARRAYS_NAME} if arrays else {MAP_NAME})
    assert is_multi_label(scaler) == (name in MULTI_LABEL)
    assert title_of(scaler)


@pytest.mark.parametrize("name", ["EnsembleTemperatureScaling", "HistogramBinning", "IsotonicScaling"])
def test_of_one_example(name: str, tmp_path: Path) -> None:
    scaler = getattr(scaling, name)().fit([[2.0, 0.0]], [0])
    scaler.save_pretrained(tmp_path)
    assert_same(Scaler.from_pretrained(tmp_path), scaler, np.array([[3.0, -1.0], [-40.0, 2.0]]))


def test_settings_come_back(tmp_path: Path) -> None:
    logits, labels = sampled("SplineScaling")
    for scaler in (
        scaling.SplineScaling("cubic", n_knots=5),
        scaling.HistogramBinning(7, binning="equal_mass"),
        scaling.DirichletScaling(off_diagonal_penalty=0.5),
        scaling.IsotonicScaling("joint"),
    ):
        scaler.fit(logits, labels).save_pretrained(tmp_path)
        loaded = Scaler.from_pretrained(tmp_path)
        assert loaded.get_params() == scaler.get_params()
        refitted = clone(loaded).fit(logits, labels)
        np.testing.assert_array_equal(refitted.predict_proba(logits), scaler.predict_proba(logits))


def adapted() -> Any:
    loss = make_loss("adafocal", n_bins=4)
    rng = np.random.default_rng(0)
    loss.update(rng.uniform(0.2, 1, size=300), rng.random(300) < 0.5)
    return loss


LOSSES: dict[str, Callable[[], Any]] = {
    "table": adapted,
    "empty table": lambda: make_loss("calfocal"),  # whose accuracies are NaN
    "steps": lambda: make_loss("flsd", thresholds=(0.3,), gammas=(4.0, 2.0)),
    "class weights": lambda: make_loss("dual_focal", gamma=2.0, class_weights=[1.0, 0.1, 3.0, 1 / 3]),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_an_inverse_link_comes_back_with_its_loss(kind: str, tmp_path: Path) -> None:
    loss = LOSSES[kind]()
    logits, _ = sampled("InverseLink")
    scaler = scaling.InverseLink(loss)
    scaler.save_pretrained(tmp_path)
    assert (tmp_path / ARRAYS_NAME).exists() == ("table" in kind)
    loaded = scaling.InverseLink.from_pretrained(tmp_path)
    assert_same(loaded, scaler, logits)
    assert (loaded.loss.name, repr(loaded.loss)) == (loss.name, repr(loss))
    assert all(
        value.equal(loaded.loss.state_dict()[key]) or value.isnan().all()
        for key, value in loss.state_dict().items()
    )


def test_what_a_file_says_of_itself(tmp_path: Path) -> None:
    scaler, _ = fitted("SplineScaling")
    before = datetime.now(timezone.utc).date()
    scaling.save_map(scaler, tmp_path, {"split": "calibration"})
    record = json.loads((tmp_path / MAP_NAME).read_text())
    assert before <= datetime.fromisoformat(record["date"]).date() <= before + timedelta(days=1)
    packages = ("hf_calib", "transformers", "torch", "scikit-learn")
    assert record["versions"] == {name: version(name) for name in packages}
    assert record["arrays"] == sha256((tmp_path / ARRAYS_NAME).read_bytes()).hexdigest()
    assert record["parameters"] == {"n_classes": 4}
    assert scaling.load_map(tmp_path).about == {"split": "calibration"}


def test_files_from_before_load(tmp_path: Path) -> None:
    """As version 0.1 wrote them."""
    record = {
        "method": "temperature",
        "settings": {"criterion": "nll", "grid": None, "n_bins": 15, "multi_label": False},
        "parameters": {"temperature": 1.7},
        "weight": 1 / 1.7,
        "bias": None,
        "split": "calibration",
        "hf_calib": "0.1.0",
    }
    (tmp_path / MAP_NAME).write_text(json.dumps(record))
    loaded = scaling.load_map(tmp_path)
    assert (loaded.scaler.temperature_, loaded.about) == (1.7, {"split": "calibration"})


def test_another_class_is_refused(tmp_path: Path) -> None:
    scaler, logits = fitted("IsotonicScaling")
    scaler.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"to hold a SplineScaling, got a IsotonicScaling; use IsotonicScaling.from_pretrained",
    ):
        scaling.SplineScaling.from_pretrained(tmp_path)
    assert_same(scaling.IsotonicScaling.from_pretrained(tmp_path), scaler, logits)


@pytest.mark.parametrize("name", [name for name in MAKE if name != "InverseLink"])
def test_what_is_not_fitted_is_not_saved(name: str, tmp_path: Path) -> None:
    with pytest.raises(NotFittedError):
        MAKE[name]().save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_of_two_scalers_in_one_folder_the_last_is_whole(tmp_path: Path) -> None:
    for name in ("SplineScaling", "IsotonicScaling", "VectorScaling"):
        scaler, logits = fitted(name)
        scaler.save_pretrained(tmp_path)
        assert_same(Scaler.from_pretrained(tmp_path), scaler, logits)
    assert not (tmp_path / ARRAYS_NAME).exists()


@pytest.mark.parametrize("first", ["SplineScaling", "HistogramBinning", "TemperatureScaling"])
def test_a_crash_between_its_files_pairs_no_two_scalers(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, logits = fitted(first)
    old.save_pretrained(tmp_path)
    whole_file = saved_map.whole_file

    def failing(target: Path) -> Any:
        if target.name == MAP_NAME:
            raise KeyboardInterrupt
        return whole_file(target)

    monkeypatch.setattr(saved_map, "whole_file", failing)
    new = MAKE[first]() if first != "TemperatureScaling" else MAKE["SplineScaling"]()
    with pytest.raises(KeyboardInterrupt):
        new.fit(logits / 3, np.arange(len(logits)) % 4).save_pretrained(tmp_path)
    if first == "TemperatureScaling":  # whose file needs no other
        assert_same(Scaler.from_pretrained(tmp_path), old, logits)
        return
    with pytest.raises(ValueError, match=r"got calibration/scaler.safetensors of another scaler beside it"):
        Scaler.from_pretrained(tmp_path)


def rewritten(folder: Path, **changes: Any) -> None:
    """Change arrays (None removes one), and let the JSON file vouch for them."""
    arrays = {**safetensors.numpy.load_file(folder / ARRAYS_NAME), **changes}
    content = safetensors.numpy.save({key: value for key, value in arrays.items() if value is not None})
    (folder / ARRAYS_NAME).write_bytes(content)
    edited(folder, arrays=sha256(content).hexdigest())


def edited(folder: Path, **changes: Any) -> None:
    record = json.loads((folder / MAP_NAME).read_text())
    (folder / MAP_NAME).write_text(json.dumps({**record, **changes}))


def test_a_rewritten_folder_loads(tmp_path: Path) -> None:
    """So what is refused below is refused for what was changed."""
    scaler, logits = fitted("SplineScaling")
    scaler.save_pretrained(tmp_path)
    rewritten(tmp_path)
    assert_same(Scaler.from_pretrained(tmp_path), scaler, logits)


BAD_ARRAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "missing": ("SplineScaling", {"scores": None}),
    "extra": ("SplineScaling", {"more": np.zeros(3)}),
    "dtype": ("SplineScaling", {"scores": np.linspace(0, 1, 400, dtype=np.float32)}),
    "integers": ("SplineScaling", {"accuracies": np.zeros(400, dtype=np.int64)}),
    "lengths": ("SplineScaling", {"scores": np.linspace(0, 1, 7)}),
    "axes": ("SplineScaling", {"scores": np.zeros((1, 400))}),
    "empty": ("SplineScaling", {"scores": np.zeros(0), "accuracies": np.zeros(0)}),
    "NaN": ("SplineScaling", {"accuracies": np.full(400, np.nan)}),
    "infinity": ("DirichletScaling", {"bias": np.full(4, np.inf)}),
    "not rising": ("SplineScaling", {"scores": np.linspace(1, 0, 400)}),
    "no frequency": ("HistogramBinning", {"frequencies": np.full((4, 15), 1.5)}),
    "other bins": ("HistogramBinning", {"frequencies": np.full((4, 16), 0.5)}),
    "other classes": ("HistogramBinning", {"frequencies": np.ones((3, 15)), "edges": np.ones((3, 16))}),
    "not square": ("DirichletScaling", {"weight": np.ones((4, 3))}),
    "four weights": ("EnsembleTemperatureScaling", {"weights": np.full(4, 0.25)}),
    "weights": ("EnsembleTemperatureScaling", {"weights": np.array([0.5, 0.7, -0.2])}),
    "sizes": ("IsotonicScaling", {"sizes": np.array([1, 1, 1, 1])}),
    "sizes that overflow": ("IsotonicScaling", {"sizes": np.array([2**62, 2**62, 2**62, 2**62])}),
    "float sizes": ("IsotonicScaling", {"sizes": np.ones(4)}),
    "two curves": ("IsotonicScaling", {"sizes": np.array([2, 2])}),
}


@pytest.mark.parametrize("damage", BAD_ARRAYS)
def test_arrays_that_no_fit_finds_are_refused(damage: str, tmp_path: Path) -> None:
    name, changes = BAD_ARRAYS[damage]
    fitted(name)[0].save_pretrained(tmp_path)
    rewritten(tmp_path, **changes)
    with pytest.raises(
        ValueError, match=r"expected .*calibration.json to hold a fitted map, got '\w+' with entries"
    ):
        Scaler.from_pretrained(tmp_path)


BAD_ENTRIES: dict[str, tuple[str, dict[str, Any]]] = {
    "no class": ("SplineScaling", {"parameters": {}}),
    "one class": ("SplineScaling", {"parameters": {"n_classes": 1}}),
    "half a class": ("SplineScaling", {"parameters": {"n_classes": 4.5}}),
    "a truth": ("SplineScaling", {"parameters": {"n_classes": True}}),
    "one more": ("SplineScaling", {"parameters": {"n_classes": 4, "predict_proba": 1}}),
    "a list": ("SplineScaling", {"parameters": [4]}),
    "a word": ("EnsembleTemperatureScaling", {"parameters": {"n_classes": 4, "temperature": "1"}}),
    "no temperature": ("EnsembleTemperatureScaling", {"parameters": {"n_classes": 4, "temperature": 0.0}}),
    "unknown setting": ("SplineScaling", {"settings": {"spline": "natural", "path": "/etc/passwd"}}),
    "nested setting": ("SplineScaling", {"settings": {"spline": {"a": 1}}}),
    "no settings": ("SplineScaling", {"settings": None}),
    "negative": ("TemperatureScaling", {"parameters": {"temperature": -2.0}, "weight": -0.5}),
    "more": ("TemperatureScaling", {"parameters": {"temperature": 2.0, "more": 1}, "weight": 0.5}),
    "multi_label": ("TemperatureScaling", {"settings": {"multi_label": "yes"}}),
    "matrix": ("VectorScaling", {"weight": np.eye(4).tolist()}),
    "choice": ("AutoScaling", {"parameters": {"choice": 3, "results": []}}),
    "cube": ("AutoScaling", {"weight": np.ones((4, 4, 4)).tolist()}),
    "no loss": ("InverseLink", {"settings": {}}),
    "unknown loss": (
        "InverseLink",
        {"settings": {"loss": {"name": "os.system", "hyperparameters": {}, "class_weights": None}}},
    ),
    "loss without link": (
        "InverseLink",
        {"settings": {"loss": {"name": "mmce", "hyperparameters": {}, "class_weights": None}}},
    ),
    "huge table": (
        "InverseLink",
        {
            "settings": {
                "loss": {"name": "adafocal", "hyperparameters": {"n_bins": 10**12}, "class_weights": None}
            }
        },
    ),
    "loss without table": (
        "InverseLink",
        {"settings": {"loss": {"name": "adafocal", "hyperparameters": {}, "class_weights": None}}},
    ),
}


@pytest.mark.parametrize("damage", BAD_ENTRIES)
def test_entries_that_no_fit_finds_are_refused(damage: str, tmp_path: Path) -> None:
    name, changes = BAD_ENTRIES[damage]
    fitted(name)[0].save_pretrained(tmp_path)
    edited(tmp_path, **changes)
    with pytest.raises(
        ValueError, match=r"expected .*calibration.json to hold a fitted map, got '\w+' with entries"
    ):
        Scaler.from_pretrained(tmp_path)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaler, _ = fitted("SplineScaling")

    def refused(message: str) -> None:
        with pytest.raises(ValueError, match=rf"calibration.json to hold a fitted map, got {message}"):
            Scaler.from_pretrained(tmp_path)

    refused("a file that cannot be read")  # there is none
    scaler.save_pretrained(tmp_path)
    content = (tmp_path / ARRAYS_NAME).read_bytes()
    pickled = b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."
    for damaged in (content[:-8], content[8:], b"", pickled, (2**60).to_bytes(8, "little") + content[8:]):
        (tmp_path / ARRAYS_NAME).write_bytes(damaged)
        edited(tmp_path, arrays=sha256(damaged).hexdigest())
        refused("calibration/scaler.safetensors that cannot be read")
    (tmp_path / ARRAYS_NAME).unlink()
    refused("calibration/scaler.safetensors that cannot be read .*No such file")
    scaler.save_pretrained(tmp_path)
    for digest in ("0" * 64, None, ["a"]):
        edited(tmp_path, arrays=digest)
        refused("calibration/scaler.safetensors of another scaler")
    for text in ("[" * 100_000, '{"method": "spline"', "\udc80"):
        (tmp_path / MAP_NAME).write_bytes(text.encode("utf-8", "surrogateescape"))
        refused("a file that cannot be read")
    scaler.save_pretrained(tmp_path)
    monkeypatch.setattr(saved_map, "_LARGEST", 1000)
    refused("calibration/scaler.safetensors that cannot be read .*more than 1,000 bytes")


def test_a_prior_correction_of_priors_is_no_endless_one(tmp_path: Path) -> None:
    correction = scaling.PriorCorrection([0.5, 0.5], [0.9, 0.1])
    correction.save_pretrained(tmp_path)
    logits = np.array([[1.0, -1.0]])
    assert_same(Scaler.from_pretrained(tmp_path), correction, logits)
    head, tail = (tmp_path / MAP_NAME).read_text().split('"scaler": null')
    depth = 2000
    (tmp_path / MAP_NAME).write_text(f'{head}"scaler": ' * depth + "null" + tail * depth)
    with pytest.raises(ValueError, match="to hold a fitted map"):
        Scaler.from_pretrained(tmp_path)


def test_a_place_that_is_none(tmp_path: Path) -> None:
    scaler, _ = fitted("TemperatureScaling")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"expected output to be writable"):
        scaler.save_pretrained(tmp_path / "file")
    for name in (tmp_path / "nothing", "../nothing", "a/b/c"):
        with pytest.raises(
            ValueError, match="expected name to be a folder, or a repository on the Hub, with"
        ):
            Scaler.from_pretrained(name)
