"""The named losses: one documented constructor each, in the table under its own name."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch

import hf_calib.losses
from hf_calib.losses import LOSSES, CalibrationLoss, make_loss
from tests.helpers.loss_cases import VARIANTS, Variant, random_batch, value_and_gradient, variant_id

# The nine points of a docstring that are sections; the others are its text.
SECTIONS = ["Args:", "Returns:", "Raises:", "Notes:", "References:", "Example:"]
WITHOUT_NOTES = {"cross_entropy", "focal_gra", "flsd_gra"}
WITHOUT_REFERENCE = {"cross_entropy"}


def test_public_names_are_sorted_and_hold_every_constructor() -> None:
    names = hf_calib.losses.__all__
    assert sorted(names, key=lambda name: (not name.isupper(), name.islower(), name)) == names
    assert set(LOSSES) <= set(names)
    for name, entry in LOSSES.items():
        assert getattr(hf_calib.losses, name) is entry.constructor


@pytest.mark.parametrize("name", LOSSES)
class TestEveryConstructor:
    def test_name_and_arguments(self, name: str) -> None:
        constructor = LOSSES[name].constructor
        assert constructor.__name__ == constructor().name == name
        parameters = inspect.signature(constructor).parameters
        assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters.values())
        assert [*LOSSES[name].hyperparameters, "class_weights", "problem_type"] == list(parameters)
        for key, hyperparameter in LOSSES[name].hyperparameters.items():
            default = parameters[key].default
            assert hyperparameter.default is default
            assert hyperparameter.parse(default) == default
            assert hyperparameter.requirement.startswith("be ")

    def test_documentation(self, name: str) -> None:
        text = inspect.getdoc(LOSSES[name].constructor)
        assert text is not None
        expected = [
            section
            for section in SECTIONS
            if not (section == "Notes:" and name in WITHOUT_NOTES)
            and not (section == "References:" and name in WITHOUT_REFERENCE)
        ]
        assert [line for line in text.splitlines() if line in SECTIONS] == expected
        arguments = text[text.index("Args:") : text.index("Returns:")]
        for parameter in inspect.signature(LOSSES[name].constructor).parameters:
            assert f"    {parameter}: " in arguments
        assert f">>> {name}(" in text or f"= {name}(" in text
        assert re.search(r"^\$\$(L = |\\frac\{\\partial L\}\{\\partial z\} = )", text, flags=re.MULTILINE)


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
def test_by_constructor_and_by_name(variant: Variant) -> None:
    name, hyperparameters = variant
    shared: dict[str, Any] = {"class_weights": [0.5, 2.0, 1.0, 3.0, 0.25]}
    loss = LOSSES[name].constructor(**hyperparameters, **shared)
    same = make_loss(name, **hyperparameters, **shared)
    assert isinstance(loss, CalibrationLoss)
    assert loss.hyperparameters == same.hyperparameters
    ours, other = (value_and_gradient(each, *random_batch(9, 5)) for each in (loss, same))
    assert torch.equal(ours[0], other[0])
    assert torch.equal(ours[1], other[1])


def test_a_constructor_checks_its_hyperparameters() -> None:
    with pytest.raises(
        ValueError, match="expected gamma of loss 'focal' to be a finite number and >= 0, got -1"
    ):
        hf_calib.losses.focal(gamma=-1)
    with pytest.raises(ValueError, match="expected rival of loss 'dual_focal' to be one of 'next', 'second'"):
        hf_calib.losses.dual_focal(rival="last")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="multi-label form, got 'mmce'"):
        hf_calib.losses.mmce(problem_type="multi_label_classification")
    for given, suggestion in {"gama": "gamma", "weight": "class_weights"}.items():
        message = rf"of loss 'focal', got '{given}'; it has: gamma=3.0 \(did you mean '{suggestion}'\?\)"
        with pytest.raises(TypeError, match=message):
            hf_calib.losses.focal(**{given: 1.0})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=message):
            make_loss("focal", **{given: 1.0})
