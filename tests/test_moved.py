"""The old paths of moved modules: each public name is still there, and says where it is now."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module

import pytest

from hf_calib._moved import HOMES, RENAMED

NAMES = {
    "callbacks": "AdaFocalCallback TemperatureScalingCallback",
    "comparison": "Comparison compare",
    "config_file": "parse_arguments",
    "demo": "run_demo",
    "folding": "check_can_be_folded fold fold_temperature",
    "inference": "EncodedRows TextClassifier encode_rows load_classifier load_rows predict",
    "posthoc": "Calibration calibrate_predictions check_data evaluate_predictions is_predictions_file name_of "
    "report_on write_report write_to",
    "posthoc_models": "Rows calibrate_model evaluate_model",
    "recipe": "BUILT_IN DataArguments label_maps load_data results_table run",
    "saving": "save_folded standalone_copy",
    "training_args": "CalibrationTrainingArguments",
}


@pytest.fixture(autouse=True)
def _not_yet_imported() -> Iterator[None]:
    """Each test meets the old modules as a new program does."""
    there = {name: sys.modules.pop(name) for name in HOMES if name in sys.modules}
    yield
    sys.modules.update(there)


def test_every_moved_module_is_here() -> None:
    assert {f"hf_calib.{module}" for module in NAMES} == set(HOMES)


@pytest.mark.parametrize("module", NAMES)
def test_public_names_are_importable_from_the_old_path(module: str) -> None:
    path = f"hf_calib.{module}"
    with pytest.warns(
        DeprecationWarning, match=rf"{path} has moved\. Import its names from {HOMES[path][0]}"
    ):
        old = import_module(path)
    for name in NAMES[module].split():
        found = getattr(old, name)
        assert any(
            getattr(import_module(home), RENAMED.get(name, name), None) is found for home in HOMES[path]
        )


def test_other_names_are_not_invented() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        old = import_module("hf_calib.posthoc")
    with pytest.raises(AttributeError, match=r"'hf_calib\.posthoc' has no attribute 'nothing'"):
        old.nothing  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match=r"hf_calib\.nothing"):
        import_module("hf_calib.nothing")


@pytest.mark.slow
def test_files_of_predictions_need_no_torch_from_the_old_path_either() -> None:
    code = "import sys; from hf_calib.posthoc import calibrate_predictions; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "False"
