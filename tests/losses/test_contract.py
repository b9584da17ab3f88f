"""The contract of every loss, whatever its formula: reductions, invariances, extremes, refusals, names."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import hf_calib.losses
from hf_calib.losses import LOSSES, make_loss
from tests.helpers.loss_cases import (
    EXACT,
    VARIANTS,
    WIDTHS,
    Variant,
    every_variant,
    every_width,
    make_variant,
    random_batch,
    value_and_gradient,
    variant_id,
    widened,
)

# Each loss with its hyperparameters and their defaults.
NAMES_AND_DEFAULTS = """
'ada_dual_focal', n_bins=15, update_rate=2.0, gamma_init=6.0, gamma_max=20.0
'adafocal', n_bins=15, update_rate=1.0, gamma_init=1.0, gamma_max=20.0, gamma_min=-2.0, switch=0.2
'avuc', avuc_weight=1.0
'brier'
'bsce', gamma=2.0, norm=2.0
'bsce_gra', gamma=2.0, norm=2.0
'calfocal', n_bins=15, update_rate=10.0, per_sample=False
'cross_entropy'
'dft'
'dual_focal', gamma=5.0, rival='next'
'dual_focal_gra', gamma=5.0, rival='next'
'ece_ce', n_bins=15
'entropy_regularized', entropy_weight=0.1
'flsd', thresholds=(0.2,), gammas=(5.0, 3.0)
'flsd_gra', thresholds=(0.2,), gammas=(5.0, 3.0)
'focal', gamma=3.0
'focal_calibration', gamma=3.0, brier_weight=0.5, distance='l2'
'focal_gra', gamma=3.0
'inverse_focal', gamma=2.0
'kde_ece', kde_weight=0.5, bandwidth=0.1, kind='top_label'
'label_smoothing', smoothing=0.05
'logit_norm', norm_weight=0.01, p=1.0
'mbls', margin_weight=0.1, margin=10.0
'mdca', mdca_weight=1.0, gamma=0.0
'mmce', mmce_weight=0.5, variant='weighted', authors_code=False
'power', exponent=1.0
'soft_ece', ece_weight=1.0, n_bins=15, variant='sb_ece', bin_temperature=0.01, rank_sharpness=100.0
"""
DEFAULTS = {
    line.split("'")[1]: line.partition(", ")[2] or "none" for line in NAMES_AND_DEFAULTS.split("\n")[1:-1]
}


def test_names_and_defaults() -> None:
    shown = [repr(make_loss(name)) for name in sorted(LOSSES)]
    assert [line.partition("(")[2][:-1] for line in shown] == NAMES_AND_DEFAULTS.split("\n")[1:-1]
    assert {name for name, _ in VARIANTS} == set(LOSSES)
    names = hf_calib.losses.__all__
    assert sorted(names, key=lambda name: (not name.isupper(), name.islower(), name)) == names
    assert all(getattr(hf_calib.losses, name) is entry.constructor for name, entry in LOSSES.items())


@every_variant
def test_reductions(variant: Variant) -> None:
    weights = torch.tensor([0.5, 2.0, 1.0, 3.0, 0.25])
    loss, weighted, lightly = (make_variant(variant, 5, class_weights=w) for w in (None, weights, [1e-6] * 5))
    logits, labels = random_batch(9, 5)
    labels[[2, 7]] = -100
    mean, total = loss(logits, labels), loss(logits, labels, reduction="sum")
    assert_close(mean, total / 7, **EXACT)
    assert_close(loss(logits, labels, num_items_in_batch=11), total / 11, **EXACT)
    assert_close(loss(logits, labels, num_items_in_batch=torch.tensor(11)), total / 11, **EXACT)
    assert loss.normalizer(labels) == 7
    normalizer = weights[labels[labels >= 0]].sum()
    assert weighted.normalizer(labels) == normalizer
    assert_close(weighted(logits, labels), weighted(logits, labels, reduction="sum") / normalizer, **EXACT)
    # One factor for all classes takes nothing from the mean, however small it is.
    assert_close(lightly(logits, labels), mean, rtol=1e-6, atol=1e-12)
    if loss.couples_batch:
        with pytest.raises(ValueError, match="expected reduction to be 'mean' or 'sum', got 'none'; "):
            loss(logits, labels, reduction="none")
    else:
        per_example = loss(logits, labels, reduction="none")
        assert per_example.shape == labels.shape
        assert per_example[[2, 7]].tolist() == [0, 0]


@every_width
@every_variant
def test_rows_in_any_order_and_shape_with_any_number_added(variant: Variant, width: int) -> None:
    """Token-level logits are rows; the loss of all but one is that of the probabilities."""
    loss = make_variant(variant, width)
    logits, labels = random_batch(24, width)
    logits = logits.mul(64).round().div(64)  # so that what is added rounds nothing off
    labels[3] = -100
    value, gradient = value_and_gradient(loss, logits, labels)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    added = 0 if loss.name == "logit_norm" else torch.arange(-12, 12)[:, None] * 256
    tokens = (logits + added)[order].view(4, 6, width), labels[order].view(4, 6)
    value_3d, gradient_3d = value_and_gradient(loss, *tokens)
    assert_close(value_3d, value, **EXACT)
    assert_close(gradient_3d.view(24, width), gradient[order], **EXACT)
    if not loss.couples_batch:
        assert loss(*tokens, reduction="none").shape == (4, 6)


@every_variant
def test_copies(variant: Variant) -> None:
    """By pickle, `copy.deepcopy` and `torch.save`: another module with the same values."""
    loss = make_variant(variant, 5, class_weights=[1.0, 2.0, 0.5, 1.0, 3.0])
    file = io.BytesIO()
    torch.save(loss, file)
    file.seek(0)
    for each in (
        pickle.loads(pickle.dumps(loss)),
        copy.deepcopy(loss),
        torch.load(file, weights_only=False),
    ):
        assert each is not loss
        assert repr(each) == repr(loss)
        assert each(*random_batch(9, 5)) == loss(*random_batch(9, 5))


@every_width
@every_variant
def test_ignored_rows_are_as_if_absent(variant: Variant, width: int) -> None:
    loss = make_variant(variant, width)
    logits, labels = random_batch(36, width)
    keep = torch.arange(36) % 3 > 0
    want_value, want_gradient = value_and_gradient(loss, logits[keep], labels[keep])
    logits[0], logits[3] = 1e4 * logits[0], -1e4 * logits[3]
    value, gradient = value_and_gradient(loss, logits, labels.where(keep, -100))
    assert_close(value, want_value, **EXACT)
    assert_close(gradient[keep], want_gradient, **EXACT)
    assert not gradient[~keep].any()


@pytest.mark.parametrize(
    "variant",
    # These read the number of classes, or the ranks of all of them.
    [
        v
        for v in VARIANTS
        if v[0] not in ("mdca", "ece_ce") and not {"canonical", "dece"} & set(v[1].values())
    ],
    ids=variant_id,
)
def test_masked_classes_are_as_if_absent(variant: Variant) -> None:
    loss = make_variant(variant, WIDTHS[-1])
    logits, labels = random_batch(30, 5)
    labels[7] = -100
    value, gradient = value_and_gradient(loss, logits, labels)
    for width in (6, WIDTHS[-1]):
        masked_value, masked_gradient = value_and_gradient(loss, widened(logits, width), labels)
        assert_close(masked_value, value, **EXACT)
        assert_close(masked_gradient[:, :5], gradient, **EXACT)
        assert not masked_gradient[:, 5:].any()


@every_width
@every_variant
def test_nothing_to_learn_from_is_zero(variant: Variant, width: int) -> None:
    """All rows ignored, or no rows: a loss of 0 that can be differentiated."""
    loss = make_variant(variant, width)
    for n, dtype, reduction in (
        (0, torch.float16, "sum"),
        (8, torch.float32, "sum"),
        (8, torch.float16, "mean"),
    ):
        logits = random_batch(n, width)[0].to(dtype)
        value, gradient = value_and_gradient(loss, logits, torch.full((n,), -100), reduction=reduction)
        assert value == 0
        assert gradient.shape == (n, width)
        assert not gradient.any()


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
        "one class": (logits, torch.full_like(labels, 3)),
        "all tied": (torch.zeros(8, 5), labels),
        "tied at the top": (torch.tensor([[2.0, 2.0, 1.0, 1.0, 0.0]]).repeat(8, 1), labels),
        "50 right": (50 * one_row.sign().repeat(8, 1), labels.mul(0)),
        "50 wrong": (50 * one_row.sign().repeat(8, 1), labels.mul(0) + 4),
        "50 mixed": (50 * logits.sign(), labels),
        "10000 right": (2e3 * one_row.repeat(8, 1), labels.mul(0)),
        "10000 wrong": (2e3 * one_row.repeat(8, 1), labels.mul(0) + 4),
        "10000 mixed": (1e4 * logits.sign(), labels),
        "offset 1000": (logits + 1000, labels),
        "masked class": (masked, labels % 4),
        "all but one masked": (masked.index_fill(1, torch.arange(1, 5), -torch.inf), labels.mul(0)),
    }


EXTREMES = extreme_batches()
ALL_EXTREMES = tuple(torch.cat(parts) for parts in zip(*EXTREMES.values(), strict=True))


@every_width
@every_variant
def test_extremes_are_finite(variant: Variant, width: int) -> None:
    loss = make_variant(variant, width)
    batches = EXTREMES if loss.couples_batch else {"all of them": ALL_EXTREMES}
    for case, (logits, labels) in batches.items():
        for dtype in (torch.float32, torch.float16):
            value, gradient = value_and_gradient(loss, widened(logits, width).to(dtype), labels)
            assert value.dtype == torch.float32
            assert gradient.dtype == dtype
            assert value.isfinite(), case
            assert gradient.isfinite().all(), case


@every_width
@every_variant
def test_an_impossible_label_has_a_finite_gradient(variant: Variant, width: int) -> None:
    """Its logit is masked. The other rows' gradients are as without it, unless the loss couples the batch."""
    loss = make_variant(variant, width)
    logits, labels = random_batch(9, width)
    others = torch.arange(9) != 2
    _, alone = value_and_gradient(loss, logits.float(), labels, reduction="sum")
    for masked in (-torch.inf, torch.finfo(torch.float32).min):
        impossible = logits.float()
        impossible[2, labels[2]] = masked
        value, gradient = value_and_gradient(loss, impossible, labels, reduction="sum")
        assert not value.isnan()
        assert gradient[2].abs().max() < 100
        if loss.couples_batch or loss.name == "ece_ce":  # which goes by the rank within the batch
            assert gradient.isfinite().all()
        else:
            assert_close(gradient[others], alone[others], rtol=1e-5, atol=1e-6)


@every_variant
def test_one_and_two_classes(variant: Variant) -> None:
    """The least there are; with the ranks of some rivals missing."""
    for n_classes in (1, 2):
        logits, labels = random_batch(9, n_classes)
        value, gradient = value_and_gradient(make_variant(variant, n_classes), logits, labels)
        assert value.isfinite()
        assert gradient.isfinite().all()


@every_width
@pytest.mark.parametrize("gamma", [0.001, 0.999])
@pytest.mark.parametrize("name", ["focal", "dual_focal", "bsce", "focal_calibration", "adafocal"])
def test_small_gamma_at_probability_1(name: str, gamma: float, width: int) -> None:
    """(1 - p)^gamma has an infinite derivative at p = 1; that of the loss is 0."""
    loss = make_loss(name, **{"gamma_init" if name == "adafocal" else "gamma": gamma})
    # At 50 in float32 p rounds to 1; at 30 it is just below.
    logits = torch.tensor([[50.0, 0.0, -1.0], [200.0, 0.0, -1.0], [30.0, -60.0, 0.0], [60.0, -1.0, 0.0]])
    logits = logits.repeat(2, 1)
    for dtype in (torch.float64, torch.float32, torch.float16):
        given = widened(logits, width).to(dtype)
        value, gradient = value_and_gradient(loss, given, torch.zeros(8, dtype=torch.long))
        assert 0 <= value < 1e-9
        assert gradient.double().abs().max() < 1e-9


@every_width
@pytest.mark.parametrize("label", [5, -1])
@pytest.mark.parametrize("name", ["focal", "dual_focal", "ece_ce", "mmce", "mbls"])
def test_labels_out_of_range(name: str, label: int, width: int) -> None:
    logits, labels = random_batch(8, width)
    labels[2] = label if label < 0 else width
    message = rf"labels to be in \[0, {width}\) or -100, got {labels[2]} in row 2; set the model's num_labels"
    with pytest.raises(ValueError, match=message):
        make_loss(name)(logits, labels)


INTEGERS, FLOATS, Z = torch.zeros(4, dtype=torch.long), torch.zeros(4), torch.zeros(4, 5)
SHAPE_OF_LABELS = r"labels to have shape \(4,\) for logits \(4, 5\), got .*; integer class indices per row"
SINGLE = {"problem_type": "single_label_classification"}
SEVERAL = {"problem_type": "multi_label_classification"}
BAD_INPUT = [
    *({"labels": labels, "message": SHAPE_OF_LABELS} for labels in (INTEGERS[1:], Z.long(), INTEGERS[0])),
    {"labels": FLOATS, "message": r"labels to have shape .*integer class indices per row"},
    {"labels": FLOATS, "loss": SINGLE, "message": r"be integer \(single label\), got torch.float"},
    {"labels": Z.long(), "loss": SEVERAL, "message": r"be float \(multi-label\), got torch.int64"},
    {"logits": Z.long(), "message": "logits to be floating point, got torch.int64; pass"},
    {"logits": Z[0], "labels": INTEGERS[0], "message": r"logits to have shape \(N, C\) or .*, got \(5,\)"},
    {"logits": [[1.0]], "error": TypeError, "message": "the model's output to have `logits`, got list; use"},
    {"reduction": "average", "message": "reduction to be one of .*, got 'average'"},
    {"loss": {"class_weights": [1, 2]}, "message": "one entry for each of the 5 classes, got 2; give them"},
]


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input(case: dict[str, Any]) -> None:
    loss = make_loss("focal", **case.get("loss", {}))
    with pytest.raises(case.get("error", ValueError), match=case["message"]):
        loss(case.get("logits", Z), case.get("labels", INTEGERS), reduction=case.get("reduction", "mean"))


def test_class_weights_that_do_not_fit() -> None:
    for weights in ([1.0, -1.0], [0.0, 1.0], [1.0, float("nan")], [[1.0, 2.0]], 3.0, "balanced"):
        with pytest.raises(ValueError, match=r"expected class_weights to be \(C,\) finite positive numbers"):
            make_loss("focal", class_weights=weights)
    with pytest.raises(ValueError, match=r"labels to be in \[0, 2\) or -100, got 5 in row 1"):
        make_loss("focal", class_weights=[1.0, 2.0]).normalizer(torch.tensor([0, 5, -100]))


NAN, INF = float("nan"), float("inf")
OUT_OF_RANGE: dict[tuple[str, str], tuple[object, ...]] = {
    ("label_smoothing", "smoothing"): (1.5,),
    ("focal", "gamma"): (-1, NAN, INF, "3", True, None),
    ("flsd", "thresholds"): ((0.5, 0.2), (1.2,), (), 0.2),
    ("flsd", "gammas"): ((5, -3), "53"),
    ("inverse_focal", "gamma"): (-1,),
    ("dual_focal", "rival"): ("fourth", None, 1.0, "-0.1", NAN, True),
    ("bsce", "norm"): (0.5,),
    ("ece_ce", "n_bins"): (0,),
    ("focal_calibration", "brier_weight"): (-0.5,),
    ("focal_calibration", "distance"): ("l3",),
    ("adafocal", "n_bins"): (2.5, True),
    ("adafocal", "update_rate"): (-1,),
    ("adafocal", "gamma_max"): (-1, "5", NAN),
    ("adafocal", "gamma_min"): (1, -INF),
    ("adafocal", "gamma_init"): ("inf",),
    ("adafocal", "switch"): (-0.2,),
    ("calfocal", "per_sample"): (1,),
    ("logit_norm", "p"): (0,),
    ("soft_ece", "bin_temperature"): (0,),
    ("kde_ece", "bandwidth"): (0,),
    ("kde_ece", "kind"): ("marginal",),
    ("mbls", "margin"): (-1,),
    ("mdca", "gamma"): (-1,),
    ("avuc", "avuc_weight"): (-0.1, "x"),
    ("power", "exponent"): (0,),
}


@pytest.mark.parametrize(("name", "key"), OUT_OF_RANGE)
def test_hyperparameters_out_of_range(name: str, key: str) -> None:
    for value in OUT_OF_RANGE[name, key]:
        for make in (partial(make_loss, name), LOSSES[name].constructor):
            with pytest.raises(ValueError, match=f"^expected {key} of loss {name!r} to be ") as error:
                make(**{key: value})
            assert f", got {value!r}; it has: {DEFAULTS[name]}" in str(error.value)


UNKNOWN_OR_AT_ODDS: list[tuple[str, dict[str, Any], str]] = [
    ("focl", {}, r"expected loss .* got 'focl'; did you mean 'focal'\?"),
    (
        "focal",
        {"problem_type": "multi_label_class"},
        "'multi_label_class'; did you mean 'multi_label_classif",
    ),
    ("focal", {"problem_type": "regression"}, "got 'regression'; calibration is about classifiers"),
    ("focal", {"gama": 1.0}, r"\(did you mean 'gamma'\?\)"),
    ("focal", {"weight": [1.0, 2.0]}, r"\(did you mean 'class_weights'\?\)"),
    ("flsd", {"gammas": (5, 4, 3)}, "one entry more than thresholds, got 1 thresholds and 3 gammas"),
    ("adafocal", {"switch": 3}, "expected switch to lie within -gamma_min and gamma_max, got"),
    ("adafocal", {"gamma_max": 0.1}, "expected switch to lie within"),
    ("ada_dual_focal", {"gamma_init": 21}, "expected gamma_init to lie in"),
]


@pytest.mark.parametrize(("name", "given", "message"), UNKNOWN_OR_AT_ODDS)
def test_names_and_hyperparameters_that_are_refused(name: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_loss(name, **given)


@pytest.mark.parametrize("name", LOSSES)
def test_unknown_hyperparameters(name: str) -> None:
    message = f"expected the hyperparameters of loss {name!r}, got 'sharpness'; it has: {DEFAULTS[name]}"
    with pytest.raises(ValueError, match=re.escape(message)):
        make_loss(name, sharpness=3)
    with pytest.raises(TypeError, match=re.escape(message)):
        LOSSES[name].constructor(sharpness=3)


@pytest.mark.parametrize(
    ("name", "key", "gamma"), [("inverse_focal", "gamma", 4), ("adafocal", "gamma_min", -4)]
)
def test_a_warning_where_inverse_focal_turns_against_the_label(name: str, key: str, gamma: int) -> None:
    message = r"^The inverse focal gamma is 4.0, above 3.59. .* Use 3.59 or less"
    for make in (partial(make_loss, name), LOSSES[name].constructor):
        with pytest.warns(UserWarning, match=message) as caught:
            make(**{key: gamma})
        assert caught[0].filename == __file__


@pytest.mark.parametrize("name", LOSSES)
def test_constructors_and_their_documentation(name: str) -> None:
    entry = LOSSES[name]
    parameters = inspect.signature(entry.constructor).parameters
    assert entry.constructor.__name__ == entry.constructor().name == name
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters.values())
    assert [*entry.hyperparameters, "class_weights", "problem_type"] == list(parameters)
    for key, hyperparameter in entry.hyperparameters.items():
        assert hyperparameter.parse(hyperparameter.default) == parameters[key].default
        assert hyperparameter.requirement.startswith("be ")
    text = inspect.getdoc(entry.constructor) or ""
    assert all(f"\n{section}:\n" in text for section in ("Args", "Returns", "Example"))
    assert "References:" in text or name == "cross_entropy"
    assert all(f"    {parameter}: " in text for parameter in parameters)
    assert f"{name}(" in text[text.index("Example:") :]
    assert re.search(r"^\$\$(L = |\\frac\{\\partial L\}\{\\partial z\} = )", text, flags=re.MULTILINE)
