"""The pictures of a report: smooth reliability, classes, histograms, risk and coverage; in hard cases too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from hf_calib import plots
from hf_calib.decisions.measured import PromiseCurve
from hf_calib.metrics import (
    classwise_calibration_error,
    corp_curve,
    corp_decomposition,
    risk_coverage_curve,
    smooth_calibration_error,
)
from hf_calib.metrics.corp import curve_of
from hf_calib.metrics.smooth import smooth_reliability
from hf_calib.metrics.sums import Interval
from tests.helpers.pictures import overlapping, written
from tests.helpers.sampled import predictions

Panel = tuple[np.ndarray, np.ndarray]
LONG = "a fine-tuned checkpoint with_a_name_that_nobody_would_choose <script> $\\frac{$"


def classifier(
    n_examples: int = 500, n_classes: int = 4, temperature: float = 0.6, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    return predictions(n_examples, n_classes, temperature, seed)


def panel(probs: np.ndarray, labels: np.ndarray) -> Panel:
    return probs.max(axis=1), (probs.argmax(axis=1) == labels).astype(float)


HARD = {
    "ordinary": classifier(),
    "two_classes": classifier(300, 2),
    "many_classes": classifier(1_000, 151),
    "thirty": classifier(30, 3),
    "all_right": (classifier(30, 3)[0], classifier(30, 3)[0].argmax(axis=1)),
    "equal": (np.tile([0.7, 0.2, 0.1], (50, 1)), np.arange(50) % 3),
    "certain": (np.eye(3)[[0, 1, 2, 0]], np.array([0, 1, 1, 2])),
    "one": (np.array([[0.6, 0.4]]), np.array([1])),
}
Drawing = Callable[..., Figure]
OF_PANELS: dict[str, Drawing] = {
    "smooth": lambda panels, **options: plots.smooth_reliability_diagram(panels, n_resamples=5, **options),
    "corp": lambda panels, **options: plots.corp_diagram(panels, n_resamples=5, **options),
    "histogram": plots.confidence_histogram,
    "risk": plots.risk_coverage_diagram,
}


# Every picture


@pytest.mark.parametrize("case", ["ordinary", "all_right", "equal", "certain", "one"])
@pytest.mark.parametrize("kind", OF_PANELS)
def test_pictures_of_hard_cases_can_be_read(kind: str, case: str) -> None:
    figure = OF_PANELS[kind]({LONG: panel(*HARD[case])}, title="A title")
    assert overlapping(figure) == []


@pytest.mark.parametrize("case", ["two_classes", "many_classes", "equal", "certain", "one"])
def test_class_pictures_of_hard_cases_can_be_read(case: str) -> None:
    probs, labels = HARD[case]
    names = [f"{LONG} {c}" for c in range(probs.shape[1])]
    assert overlapping(plots.class_reliability_grid(probs, labels, class_names=names, title="t")) == []


@pytest.mark.parametrize("kind", OF_PANELS)
def test_names_are_text_not_formulas(kind: str, tmp_path: Path) -> None:
    figure = OF_PANELS[kind]({"$\\frac{$": panel(*HARD["thirty"])}, title=r"\undefined $x^$")
    plots.save_figure(figure, tmp_path / "odd.png")
    assert any("$\\frac{$" in text for text in written(figure))


@pytest.mark.parametrize("kind", OF_PANELS)
def test_several_models_have_their_own_looks(kind: str) -> None:
    models = {f"model {k}": panel(*classifier(100, seed=k)) for k in range(3)}
    figure = OF_PANELS[kind](models)
    assert overlapping(figure) == []
    assert all(any(name in text for text in written(figure)) for name in models)


@pytest.mark.parametrize("kind", OF_PANELS)
def test_what_does_not_fit_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=r"a diagram to have at least one panel, got none"):
        OF_PANELS[kind]({})
    with pytest.raises(ValueError, match=r"confidences of panel 'm' to lie in \[0, 1\], got .* to 4.2"):
        OF_PANELS[kind]({"m": ([0.5, 4.2], [1, 0])})


# Smooth reliability


def test_the_curve_is_that_of_the_metrics_between_the_extreme_confidences() -> None:
    confidences, correct = panel(*classifier(400, 2, temperature=1))
    upper, _ = plots.smooth_reliability_diagram({"m": (confidences, correct)}, n_resamples=5).axes
    (line,) = (c for c in upper.collections if isinstance(c, LineCollection))
    segments = np.array(line.get_segments())
    curve = smooth_reliability(confidences, correct)
    assert curve.bandwidth < bandwidth_limit(confidences)
    shown = (curve.grid >= confidences.min()) & (curve.grid <= confidences.max())
    np.testing.assert_allclose(segments[:, 0, 0], curve.grid[shown][:-1])
    np.testing.assert_allclose(segments[:, 0, 1], curve.accuracy[shown][:-1])
    np.testing.assert_allclose(segments[-1, 1], [curve.grid[shown][-1], curve.accuracy[shown][-1]])
    middle = (curve.density[shown][1:] + curve.density[shown][:-1]) / 2
    assert np.argmax(line.get_linewidths()) == np.argmax(middle)


def bandwidth_limit(confidences: np.ndarray) -> float:
    return 1.06 * confidences.std() / len(confidences) ** 0.2


def test_a_large_error_does_not_flatten_the_curve() -> None:
    """Right below a confidence of 0.5 never, above always: the error, 0.25, is no bandwidth to see that with."""
    confidences = np.linspace(0, 1, 2_001)
    correct = (confidences > 0.5).astype(float)
    assert smooth_reliability(confidences, correct).bandwidth > 0.15
    for draw in (OF_PANELS["smooth"],):
        axes = draw({"m": (confidences, correct)}).axes[0]
        lines = [c for c in axes.collections if isinstance(c, LineCollection)]
        x, y = (np.array(lines[0].get_segments())[:, 0] if lines else axes.lines[1].get_xydata()).T
        reach = 3 * bandwidth_limit(confidences)
        assert y[x < 0.5 - reach].max() < 0.01
        assert y[x > 0.5 + reach].min() > 0.99


def test_the_smooth_panel_states_its_numbers() -> None:
    probs, labels = classifier()
    confidences, correct = panel(probs, labels)
    figure = plots.smooth_reliability_diagram({"m": (confidences, correct)}, n_resamples=5)
    error = smooth_calibration_error(probs, labels)
    assert f"smECE {error:.3f}   accuracy {correct.mean():.3f}   N 500" in written(figure)
    accuracy, stated = (line.get_xdata()[0] for line in figure.axes[1].lines)
    assert (accuracy, stated) == (correct.mean(), pytest.approx(confidences.mean()))


def band(figure: Figure) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Grid, lower and upper limit of the band of the first panel."""
    (filled,) = (c for c in figure.axes[0].collections if c.get_label().endswith("band"))
    vertices = filled.get_paths()[0].vertices
    grid = np.unique(vertices[:, 0])
    low, high = (
        np.array([pick(vertices[vertices[:, 0] == x, 1]) for x in grid]) for pick in (np.min, np.max)
    )
    return grid, low, high


def test_the_band_holds_the_diagonal_of_a_calibrated_model_and_not_of_another() -> None:
    rng = np.random.default_rng(0)
    confidences = rng.uniform(0.3, 1, 2_000)
    for chance, calibrated in ((confidences, True), (confidences**2, False)):
        correct = (rng.random(2_000) < chance).astype(float)
        grid, low, high = band(plots.smooth_reliability_diagram({"m": (confidences, correct)}))
        inside = ((low <= grid) & (grid <= high))[(grid > 0.4) & (grid < 0.9)]
        assert inside.mean() > 0.8 if calibrated else inside.mean() < 0.1


def test_the_band_narrows_with_examples_and_widens_with_its_level() -> None:
    def width(n_examples: int, level: float) -> float:
        panels = {"m": panel(*classifier(n_examples, 3))}
        _, low, high = band(plots.smooth_reliability_diagram(panels, confidence_level=level))
        return float((high - low).mean())

    assert width(1_000, 0.95) < width(300, 0.95)
    assert width(300, 0.5) < width(300, 0.95)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"confidence_level": 1.0}, r"confidence_level to lie in \(0, 1\), got 1.0"),
        ({"n_resamples": 1}, "n_resamples to be at least 2, got 1"),
    ],
)
def test_bands_that_cannot_be_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plots.smooth_reliability_diagram({"m": ([0.5, 0.6], [1, 0])}, **options)


def test_many_models_differ_in_colour_or_dash() -> None:
    models = {f"model {k}": panel(*classifier(60, seed=k)) for k in range(12)}
    lines = plots.risk_coverage_diagram(models).axes[0].lines[:12]
    assert len(lines) == 12
    assert len({(to_hex(line.get_color()), str(line._dash_pattern)) for line in lines}) == 12


# Histograms


def test_right_is_up_and_wrong_is_down() -> None:
    confidences, correct = np.array([0.9, 0.9, 0.6, 0.6]), np.array([1, 1, 1, 0])
    (axes,) = plots.confidence_histogram({"m": (confidences, correct)}, n_bins=2).axes
    up, down = ([bar.get_height() for bar in container] for container in axes.containers)
    assert up == [0, 1]
    assert down == [0, -1]
    (axes,) = plots.confidence_histogram({"m": (confidences, correct)}, n_bins=4).axes
    up, down = ([bar.get_height() for bar in container] for container in axes.containers)
    assert up == pytest.approx([0, 0, 1 / 3, 2 / 3])
    assert down == [0, 0, -1, 0]
    low, high = axes.get_ylim()
    assert low == -high
    assert high > 1


# Risk and coverage


def test_the_risk_curve_is_that_of_the_metrics_within_its_bounds() -> None:
    confidences, correct = panel(*classifier(200))
    (axes,) = plots.risk_coverage_diagram({"m": (confidences, correct)}).axes
    curve, random, best = axes.lines
    coverage, risk = risk_coverage_curve(confidences, correct)
    np.testing.assert_array_equal(curve.get_xdata(), coverage)
    np.testing.assert_array_equal(curve.get_ydata(), risk)
    assert f"m (area {risk.mean():.4f})" == curve.get_label()
    assert random.get_ydata()[0] == pytest.approx(1 - correct.mean())
    ideal = risk_coverage_curve(correct, correct).risk
    assert best.get_ydata() == pytest.approx(np.sort(ideal))
    assert (risk >= np.interp(coverage, best.get_xdata(), best.get_ydata()) - 1e-12).all()


def test_a_long_curve_keeps_its_ends() -> None:
    confidences, correct = panel(*classifier(30_000, 2))
    curve = plots.risk_coverage_diagram({"a": (confidences, correct)}).axes[0].lines[0]
    risk = risk_coverage_curve(confidences, correct).risk
    assert len(curve.get_xdata()) <= 1_000
    assert (curve.get_ydata()[0], curve.get_ydata()[-1]) == (risk[0], risk[-1])


# Promised accuracies


def test_the_diagram_shows_what_is_answered_and_how_right() -> None:
    kept = (Interval(0.95, 0.9, 0.98), Interval(0.97, 0.91, 0.99), None)
    figure = plots.promise_diagram(
        {
            "a $x$": PromiseCurve((0.9, 0.95, 0.99), (0.8, 0.6, 0.0), kept),
            "b": PromiseCurve((0.9,), (0.5,), (None,)),
        }
    )
    left, right = figure.axes
    assert [line.get_xydata().tolist() for line in left.lines] == [
        [[0.9, 0.8], [0.95, 0.6], [0.99, 0.0]],
        [[0.9, 0.5]],
    ]
    (bars,) = right.containers
    assert bars.lines[0].get_xydata().tolist() == [[0.9, 0.95], [0.95, 0.97]]
    ends = np.array([segment[:, 1] for segment in bars.lines[2][0].get_segments()])
    np.testing.assert_allclose(ends, [[0.9, 0.98], [0.91, 0.99]])
    (promised,) = [line for line in right.lines if line.get_linestyle() == ":"]
    np.testing.assert_array_equal(promised.get_xdata(), promised.get_ydata())
    assert {"a $x$", "b", "accuracy promised", "inputs answered"} <= set(written(figure))
    assert overlapping(figure) == []


def test_a_diagram_without_a_promise_is_refused() -> None:
    with pytest.raises(ValueError, match="a diagram to have at least one promised accuracy, got none"):
        plots.promise_diagram({"a": PromiseCurve((), (), ())})


# Classes


def test_the_worst_classes_are_shown_and_it_says_so() -> None:
    probs, labels = classifier(600, 20)
    figure = plots.class_reliability_grid(probs, labels, n_bins=15)
    assert len(figure.axes) == 12
    assert figure.get_suptitle() == "12 of 20 classes: those with the largest error"
    onehot = np.stack([1 - probs, probs], axis=2)
    errors = [classwise_calibration_error(onehot[:, c], (labels == c).astype(int)) for c in range(20)]
    shown = [int(axes.texts[0].get_text()) for axes in figure.axes]
    assert shown == np.argsort(-np.array(errors))[:12].tolist()
    counts = np.bincount(labels, minlength=20)
    for c, axes in zip(shown, figure.axes, strict=True):
        assert axes.texts[1].get_text() == f"error {errors[c]:.3f}, {counts[c]} examples"


def test_a_class_panel_shows_its_bins_with_wilson_intervals() -> None:
    probs = np.repeat([[0.75, 0.25], [0.25, 0.75]], [40, 10], axis=0)
    labels = np.repeat([0, 1, 1, 0], [30, 10, 10, 0])
    axes = plots.class_reliability_grid(probs, labels, n_bins=2).axes[0]
    points = axes.collections[1].get_offsets()
    np.testing.assert_allclose(points, [[0.25, 0], [0.75, 0.75]])
    limits = np.array([segment[:, 1] for segment in axes.collections[0].get_segments()])
    z, n, f = 1.959963984540054, 40, 0.75  # Wilson 1927: where (f - p)^2 = z^2 p (1 - p) / n
    for p in limits[1]:
        assert (f - p) ** 2 == pytest.approx(z**2 * p * (1 - p) / n)
    assert limits[0] == pytest.approx([0, z**2 / (10 + z**2)])


def test_names_of_other_classes_are_refused() -> None:
    with pytest.raises(ValueError, match="class_names to be 4 names, got 1"):
        plots.class_reliability_grid(*classifier(), class_names=["a"])


def test_names_in_letters_that_the_font_lacks_are_drawn_as_boxes(tmp_path: Path) -> None:
    figure = plots.class_reliability_grid(*predictions(300, 3), class_names=["猫", "犬", "鳥"])
    plots.save_figure(figure, tmp_path / "grid.png")  # warnings are errors here
    assert (tmp_path / "grid.png").stat().st_size > 1000


# CORP


def test_the_corp_diagram_draws_the_curve_and_its_parts() -> None:
    rng = np.random.default_rng(0)
    confidences = rng.uniform(0.5, 1, 600)
    correct = (rng.random(600) < confidences - 0.1).astype(float)
    upper, lower = plots.corp_diagram({"m": (confidences, correct)}, n_resamples=20).axes
    probs, labels = np.stack([confidences, 1 - confidences], axis=1), (1 - correct).astype(int)
    curve = corp_curve(probs, labels, n_resamples=1)
    (drawn,) = (line for line in upper.lines if line.get_label() == "recalibrated")
    np.testing.assert_allclose(drawn.get_xydata().T, [curve.confidences, curve.recalibrated])
    parts = corp_decomposition(probs, labels)
    assert upper.get_title(loc="left").startswith(
        f"MCB {parts.miscalibration:.4f}   DSC {parts.discrimination:.4f}"
    )
    assert sum(bar.get_height() for bar in lower.patches) == 600
    (legend,) = upper.figure.legends
    assert "90% pointwise band if calibrated" in [text.get_text() for text in legend.get_texts()]


def test_many_confidences_take_fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_calib.plots.style._VALUES_RESAMPLED", 10)
    asked: list[int] = []

    def counted(*panel: object, n_resamples: int, **options: object) -> object:
        asked.append(n_resamples)
        return curve_of(*panel, n_resamples=2, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("hf_calib.plots.unbinned.curve_of", counted)
    plots.corp_diagram({"m": (np.linspace(0.5, 1, 40), np.ones(40))})
    assert asked == [50]
