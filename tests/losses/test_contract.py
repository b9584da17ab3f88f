"""The contract of every loss, whatever its formula: reductions, invariances, extremes, refusals, names."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import hf_calib.losses
from hf_calib.losses import LOSSES, make_loss
from tests.helpers import loss_cases as cases
from tests.helpers.loss_cases import (
    EXACT,
    Variant,
    every_variant,
    random_batch,
    wide_when_slow,
)


@pytest.mark.parametrize("name", LOSSES)
def test_constructors_and_their_documentation(name: str) -> None:
    entry = LOSSES[name]
    assert getattr(hf_calib.losses, name) is entry.constructor
    parameters = inspect.signature(entry.constructor).parameters
    assert entry.constructor.__name__ == entry.constructor().name == name
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters.values())
    shared = ["class_weights", "pos_weight", "problem_type"]
    assert [*entry.hyperparameters, *shared] == list(parameters)
    text = inspect.getdoc(entry.constructor) or ""
    for key, hyperparameter in entry.hyperparameters.items():
        assert hyperparameter.parse(hyperparameter.default) == parameters[key].default
        assert f"    {key}: " in text
    assert "\nReferences:\n" in text or name == "cross_entropy"
    assert f"{name}(" in text[text.index("\nExample:\n") :]
    assert re.search(
        r"^\$\$(L = |\\frac\{\\partial L\}\{\\partial z\} = )", text, flags=re.MULTILINE
    )
    assert name in cases.FORMULAS


@every_variant
def test_reductions_and_copies(variant: Variant) -> None:
    weights = torch.tensor([0.5, 2.0, 1.0, 3.0, 0.25])
    loss, weighted = (
        cases.make_variant(variant, 5, class_weights=each) for each in (None, weights)
    )
    lightly = cases.make_variant(variant, 5, class_weights=[1e-6] * 5)
    logits, labels = random_batch(9, 5)
    labels[[2, 7]] = -100
    mean, total = loss(logits, labels), loss(logits, labels, reduction="sum")
    assert_close(mean, total / 7, **EXACT)
    for items in (11, torch.tensor(11)):
        assert_close(
            loss(logits, labels, num_items_in_batch=items), total / 11, **EXACT
        )
    assert loss.normalizer(labels) == 7
    normalizer = weights[labels[labels >= 0]].sum()
    assert weighted.normalizer(labels) == normalizer
    weighted_mean = weighted(logits, labels)
    assert_close(
        weighted_mean, weighted(logits, labels, reduction="sum") / normalizer, **EXACT
    )
    # One factor for all classes takes nothing from the mean, however small it is.
    assert_close(lightly(logits, labels), mean, rtol=1e-6, atol=1e-12)
    if loss.couples_batch:
        with pytest.raises(
            ValueError, match="expected reduction to be 'mean' or 'sum', got 'none'; "
        ):
            loss(logits, labels, reduction="none")
    else:
        assert loss(logits, labels, reduction="none")[[2, 7]].tolist() == [0, 0]
    file = io.BytesIO()
    torch.save(weighted, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for each in (pickle.loads(pickle.dumps(weighted)), copy.deepcopy(weighted), loaded):
        assert repr(each) == repr(weighted)
        assert each(logits, labels) == weighted_mean


@wide_when_slow
@every_variant
def test_rows_in_any_order_and_shape_with_any_number_added(
    variant: Variant, width: int
) -> None:
    """Token-level logits are rows; the loss of all but one is that of the probabilities."""
    loss = cases.make_variant(variant, width)
    logits, labels = random_batch(24, width)
    logits = logits.mul(64).round().div(64)  # so that what is added rounds nothing off
    labels[3] = -100
    value, gradient = cases.value_and_gradient(loss, logits, labels)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    added = 0 if loss.name == "logit_norm" else torch.arange(-12, 12)[:, None] * 256
    tokens = (logits + added)[order].view(4, 6, width), labels[order].view(4, 6)
    value_3d, gradient_3d = cases.value_and_gradient(loss, *tokens)
    assert_close(value_3d, value, **EXACT)
    assert_close(gradient_3d.view(24, width), gradient[order], **EXACT)
    assert loss.couples_batch or loss(*tokens, reduction="none").shape == (4, 6)


@wide_when_slow
@every_variant
def test_ignored_rows_are_as_if_absent(variant: Variant, width: int) -> None:
    """Of nothing but ignored rows, or no rows, the loss is 0, and can be differentiated."""
    loss = cases.make_variant(variant, width)
    logits, labels = random_batch(36, width)
    keep = torch.arange(36) % 3 > 0
    want_value, want_gradient = cases.value_and_gradient(
        loss, logits[keep], labels[keep]
    )
    logits[0], logits[3] = 1e4 * logits[0], -1e4 * logits[3]
    value, gradient = cases.value_and_gradient(loss, logits, labels.where(keep, -100))
    assert_close(value, want_value, **EXACT)
    assert_close(gradient[keep], want_gradient, **EXACT)
    assert not gradient[~keep].any()
    for n, dtype, reduction in (
        (0, torch.half, "sum"),
        (8, torch.float, "sum"),
        (8, torch.half, "mean"),
    ):
        nothing = random_batch(n, width)[0].to(dtype), torch.full((n,), -100)
        value, gradient = cases.value_and_gradient(loss, *nothing, reduction=reduction)
        assert value == 0
        assert gradient.shape == (n, width)
        assert not gradient.any()


@every_variant
def test_masked_classes_are_as_if_absent(variant: Variant) -> None:
    if variant[0] in ("mdca", "ece_ce") or {"canonical", "dece"} & set(
        variant[1].values()
    ):
        pytest.skip("it reads the number of classes, or the ranks of all of them")
    loss = cases.make_variant(variant, cases.WIDTHS[-1])
    logits, labels = random_batch(30, 5)
    labels[7] = -100
    value, gradient = cases.value_and_gradient(loss, logits, labels)
    for width in (6, cases.WIDTHS[-1]):
        masked_value, masked_gradient = cases.value_and_gradient(
            loss, cases.widened(logits, width), labels
        )
        assert_close(masked_value, value, **EXACT)
        assert_close(masked_gradient[:, :5], gradient, **EXACT)
        assert not masked_gradient[:, 5:].any()


def extreme_batches() -> dict[str, tuple[Tensor, Tensor]]:
    logits, labels = random_batch(8, 5)
    top = logits.argmax(1)
    one_row = torch.tensor([[5.0, 1.0, 0.0, -1.0, -2.0]])
    masked = logits.clone()
    masked[:, 4] = -torch.inf
    return {
        "one row right": (one_row, torch.tensor([0])),
        "one row wrong": (one_row, torch.tensor([1])),
        "all right": (logits, top),
        "all wrong": (logits, (top + 1) % 5),
        "tied at the top": (
            torch.tensor([[2.0, 2.0, 1.0, 1.0, 0.0]]).repeat(8, 1),
            labels,
        ),
        "10000 right": (2e3 * one_row.repeat(8, 1), labels.mul(0)),
        "10000 wrong": (2e3 * one_row.repeat(8, 1), labels.mul(0) + 4),
        "10000 mixed": (1e4 * logits.sign(), labels),
        "offset 1000": (logits + 1000, labels),
        "masked class": (masked, labels % 4),
        "all but one masked": (
            masked.index_fill(1, torch.arange(1, 5), -torch.inf),
            labels.mul(0),
        ),
    }


EXTREMES = extreme_batches()
ALL_EXTREMES = {
    "all": tuple(torch.cat(parts) for parts in zip(*EXTREMES.values(), strict=True))
}


@wide_when_slow
@every_variant
def test_extremes_are_finite(variant: Variant, width: int) -> None:
    loss = cases.make_variant(variant, width)
    for case, (logits, labels) in (
        EXTREMES if loss.couples_batch else ALL_EXTREMES
    ).items():
        for dtype in (torch.float32, torch.float16):
            value, gradient = cases.value_and_gradient(
                loss, cases.widened(logits, width).to(dtype), labels
            )
            assert (value.dtype, gradient.dtype) == (torch.float32, dtype)
            assert value.isfinite(), case
            assert gradient.isfinite().all(), case


@wide_when_slow
@every_variant
def test_an_impossible_label_has_a_finite_gradient(
    variant: Variant, width: int
) -> None:
    """Its logit is masked. The other rows' gradients are as without it, unless the loss couples the batch."""
    loss = cases.make_variant(variant, width)
    logits, labels = random_batch(9, width)
    others = torch.arange(9) != 2
    _, alone = cases.value_and_gradient(loss, logits.float(), labels, reduction="sum")
    for masked in (-torch.inf, torch.finfo(torch.float32).min):
        impossible = logits.float()
        impossible[2, labels[2]] = masked
        value, gradient = cases.value_and_gradient(
            loss, impossible, labels, reduction="sum"
        )
        assert not value.isnan()
        assert gradient[2].abs().max() < 100
        if (
            loss.couples_batch or loss.name == "ece_ce"
        ):  # which goes by the rank within the batch
            assert gradient.isfinite().all()
        else:
            assert_close(gradient[others], alone[others], rtol=1e-5, atol=1e-6)


@every_variant
def test_one_and_two_classes(variant: Variant) -> None:
    """The least there are; with the ranks of some rivals missing."""
    for n_classes in (1, 2):
        value, gradient = cases.value_and_gradient(
            cases.make_variant(variant, n_classes), *random_batch(9, n_classes)
        )
        assert value.isfinite()
        assert gradient.isfinite().all()


@wide_when_slow
@pytest.mark.parametrize("label", [5, -1])
@pytest.mark.parametrize("name", ["focal", "dual_focal", "ece_ce", "mmce", "mbls"])
def test_labels_out_of_range(name: str, label: int, width: int) -> None:
    logits, labels = random_batch(8, width)
    labels[2] = label if label < 0 else width
    message = rf"labels to be in \[0, {width}\) or -100, got {labels[2]} in row 2; set the model's num_labels"
    loss = make_loss(name, class_weights=[1.0] * width)
    for make in (make_loss(name), loss):
        with pytest.raises(ValueError, match=message):
            make(logits, labels)
    # Without logits it is not known whether the label or the number of weights is wrong.
    if label > 0:
        message = rf"class_weights to have an entry for each label, got {width} for label {width} in row 2; give"
    with pytest.raises(ValueError, match=message):
        loss.normalizer(labels)


INTEGERS, FLOATS, Z = (
    torch.zeros(4, dtype=torch.long),
    torch.zeros(4),
    torch.zeros(4, 5),
)
SHAPE = r"labels to have shape \(4,\) for logits \(4, 5\), got .*; integer class indices per row"
SINGLE, SEVERAL = (
    {"problem_type": f"{each}_label_classification"} for each in ("single", "multi")
)
BAD_INPUT: list[tuple[Any, Any, dict[str, Any], str]] = [
    *((Z, labels, {}, SHAPE) for labels in (INTEGERS[1:], Z.long(), INTEGERS[0])),
    (Z, FLOATS, {}, "labels to have shape .*integer class indices per row"),
    (Z, FLOATS, SINGLE, r"be integer \(single label\), got torch.float"),
    (Z, Z.long(), SEVERAL, r"be float \(multi-label\), got torch.int64"),
    (Z, [0, 1, 2, 3], {}, "labels to be a tensor, got list; convert them"),
    (Z[0], INTEGERS[0], {}, r"logits to have shape \(N, C\) or .*, got \(5,\)"),
    ([[1.0]], INTEGERS, {}, "the model's output to have `logits`, got list; use"),
    (
        Z,
        INTEGERS,
        {"class_weights": [1, 2]},
        "one entry for each of the 5 classes, got 2; give them",
    ),
]


@pytest.mark.parametrize(("logits", "labels", "given", "message"), BAD_INPUT)
def test_bad_input(
    logits: Any, labels: Any, given: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make_loss("focal", **given)(logits, labels)
    with pytest.raises(ValueError, match=r"reduction to be one of .*, got 'average'"):
        make_loss("focal")(Z, INTEGERS, reduction="average")
    for weights in (
        *([1.0, each] for each in (-1.0, 0.0, NAN, INF, 1e300, 1e-300)),
        *([1.0, each] for each in (True, "a", "2", None, 1j, b"2")),
        *([[1.0, 2.0]], [], 3.0, "balanced", {1: 1.0, 2: 2.0}, {1.0, 2.0}, True, b"12"),
        *(torch.tensor([True, True]), np.array(["1", "2"]), np.ones((1, 2))),
    ):
        with pytest.raises(
            ValueError,
            match=r"expected class_weights to be \(C,\) finite positive numbers",
        ):
            make_loss("focal", class_weights=weights)


NAN, INF = float("nan"), float("inf")
OUT_OF_RANGE: list[tuple[str, str, tuple[object, ...]]] = [
    ("label_smoothing", "smoothing", (1.5,)),
    ("focal", "gamma", (-1, NAN, INF, None, 10**400)),
    ("flsd", "thresholds", ((0.5, 0.2), (1.2,), (), 0.2, {0.2: 5.0}, {0.2})),
    ("flsd", "gammas", ((-1, 3), (), 3.0, {5: 1, 3: 2})),
    ("dual_focal", "rival", ("fourth", None, 1.0, "-0.1", "0.5", NAN)),
    ("focal_calibration", "distance", ("l3",)),
    ("adafocal", "n_bins", (0, 2.5, 10**12)),
    ("adafocal", "gamma_max", (-1, "5", NAN)),
]
# No hyperparameter is a truth value or a number in another type, unless it is declared so.
OTHER_TYPES = (
    *(True, False, np.True_, np.False_, torch.tensor(True), torch.tensor(False)),
    *("0.5", b"0.5", "yes", [0.5], 0.5 + 0j, None),
)
for _name, _entry in LOSSES.items():
    for _key, _default in _entry.hyperparameters.items():
        if isinstance(_default.default, bool):
            _values: tuple[object, ...] = (0, 1, "yes", "true", None, np.True_)
        elif isinstance(_default.default, tuple):
            _values = tuple((each, 1.0) for each in OTHER_TYPES)
        else:
            _values = OTHER_TYPES
        OUT_OF_RANGE.append((_name, _key, _values))


@pytest.mark.parametrize(("name", "key", "values"), OUT_OF_RANGE)
def test_hyperparameters_out_of_range(
    name: str, key: str, values: tuple[object, ...]
) -> None:
    for value in values:
        for make in (partial(make_loss, name), LOSSES[name].constructor):
            with pytest.raises(
                ValueError, match=f"^expected {key} of loss {name!r} to be "
            ) as error:
                make(**{key: value})
            first, known = next(iter(LOSSES[name].hyperparameters.items()))
            assert f", got {value!r}; it has: {first}={known.default!r}" in str(
                error.value
            )


UNKNOWN_OR_AT_ODDS: list[tuple[str, dict[str, Any], str]] = [
    ("focl", {}, r"expected loss .* got 'focl'; did you mean 'focal'\?"),
    (
        "focal",
        {"problem_type": "multi_label_class"},
        "; did you mean 'multi_label_classification'",
    ),
    (
        "focal",
        {"problem_type": "regression"},
        "got 'regression'; calibration is about classifiers",
    ),
    (
        "focal",
        {"gama": 1.0},
        r"of loss 'focal', got 'gama'; it has: gamma=3.0 \(did you mean 'gam",
    ),
    ("focal", {"problem_type": ["x"]}, "problem_type to be one of"),
    ("focal", {"problem_type": True}, "problem_type to be one of"),
    (["focal"], {}, "expected loss to be a name in LOSSES"),  # type: ignore[list-item]
    (None, {}, "expected loss to be a name in LOSSES"),  # type: ignore[list-item]
    ("focal", {"weight": [1.0, 2.0]}, r"\(did you mean 'class_weights'\?\)"),
    ("flsd", {"gammas": (5, 4, 3)}, "one entry more than thresholds, got 3 for 1"),
    (
        "adafocal",
        {"switch": 3},
        "expected switch to lie within -gamma_min and gamma_max, got",
    ),
    ("ada_dual_focal", {"gamma_init": 21}, "expected gamma_init to lie in"),
]


@pytest.mark.parametrize(("name", "given", "message"), UNKNOWN_OR_AT_ODDS)
def test_names_and_hyperparameters_that_are_refused(
    name: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_loss(name, **given)
    for make in (make_loss, lambda name, **given: LOSSES[name].constructor(**given)):
        with pytest.raises(
            (ValueError, TypeError), match="loss 'brier', got 'sharpness'; it has: none"
        ):
            make("brier", sharpness=3)


@pytest.mark.parametrize(
    ("name", "given"),
    [("inverse_focal", {"gamma": 4}), ("adafocal", {"gamma_min": -4})],
)
def test_a_warning_where_inverse_focal_turns_against_the_label(
    name: str, given: dict[str, float]
) -> None:
    message = r"^The inverse focal gamma is 4.0, above 3.59. .* Use 3.59 or less"
    for make in (partial(make_loss, name), LOSSES[name].constructor):
        with pytest.warns(UserWarning, match=message) as caught:
            make(**given)
        assert caught[0].filename == __file__
