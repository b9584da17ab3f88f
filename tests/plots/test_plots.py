"""The figures: what they show, that it can be read in hard cases, and that nothing outside the figure changes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from hf_calib import plots
from hf_calib.metrics import (
    corp_curve,
    corp_decomposition,
    risk_coverage_curve,
    smooth_calibration_error,
)
from hf_calib.metrics.smooth import smooth_reliability
from hf_calib.metrics.sums import (
    BinSums,
    TopLabel,
    bin_sums,
    class_gaps,
    top_label_error,
)
from hf_calib.plots import (
    gamma_dynamics,
    reliability_diagram,
    reliability_grid,
    save_figure,
)
from hf_calib.plots.binned import reliability_of_sums
from tests.helpers.pictures import overlapping, written
from tests.helpers.sampled import predictions as classifier

Panel = tuple[np.ndarray, np.ndarray]
LONG = "a fine-tuned checkpoint with_a_name_that_nobody_would_choose <script> $\\frac{$"


def sampled(n_examples: int = 3000, power: float = 1.0, seed: int = 0) -> Panel:
    """Predictions that are right with probability confidence ** power."""
    rng = np.random.default_rng(seed)
    confidences = rng.uniform(0.3, 1, n_examples)
    return confidences, (rng.random(n_examples) < confidences**power).astype(float)


def panel(probs: np.ndarray, labels: np.ndarray) -> Panel:
    return probs.max(axis=1), (probs.argmax(axis=1) == labels).astype(float)


def slow(case: str) -> Any:
    return pytest.param(case, marks=pytest.mark.slow)


# ---- Every figure ----

HARD = {
    "ordinary": classifier(500, 4, 0.6, 0),
    "two_classes": classifier(300, 2, 0.6, 0),
    "many_classes": classifier(1_000, 151, 0.6, 0),
    "all_right": (
        classifier(30, 3, 0.6, 0)[0],
        classifier(30, 3, 0.6, 0)[0].argmax(axis=1),
    ),
    "equal": (np.tile([0.7, 0.2, 0.1], (50, 1)), np.arange(50) % 3),
    "certain": (np.eye(3)[[0, 1, 2, 0]], np.array([0, 1, 1, 2])),
    "one": (np.array([[0.6, 0.4]]), np.array([1])),
}
OF_PANELS: dict[str, Callable[..., Figure]] = {
    "reliability": plots.reliability_diagram,
    "smooth": lambda panels, **options: plots.smooth_reliability_diagram(
        panels, n_resamples=5, **options
    ),
    "corp": lambda panels, **options: plots.corp_diagram(
        panels, n_resamples=5, **options
    ),
    "histogram": plots.confidence_histogram,
    "risk": plots.risk_coverage_diagram,
}


@pytest.mark.parametrize(
    "case",
    [
        "ordinary",
        *(slow(case) for case in ("all_right", "equal", "certain", "one")),
    ],
)
@pytest.mark.parametrize("kind", OF_PANELS)
def test_hard_cases_can_be_read(kind: str, case: str) -> None:
    assert (
        overlapping(OF_PANELS[kind]({LONG: panel(*HARD[case])}, title="A title")) == []
    )


@pytest.mark.parametrize(
    "case",
    [
        "two_classes",
        *(slow(case) for case in ("many_classes", "equal", "certain", "one")),
    ],
)
def test_classes_of_hard_cases_can_be_read(case: str) -> None:
    probs, labels = HARD[case]
    names = [f"{LONG} {c}" for c in range(probs.shape[1])]
    assert (
        overlapping(
            plots.class_reliability_grid(probs, labels, class_names=names, title="t")
        )
        == []
    )


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind == "reliability" else pytest.param(kind, marks=pytest.mark.slow)
        for kind in OF_PANELS
    ],
)
def test_several_models_have_their_own_names_which_are_no_formulas(
    kind: str, tmp_path: Path
) -> None:
    models = {f"model {k} $\\frac{{$": sampled(100, seed=k) for k in range(3)}
    figure = OF_PANELS[kind](models, title=r"\undefined $x^$")
    assert overlapping(figure) == []
    assert all(any(name in text for text in written(figure)) for name in models)
    save_figure(figure, tmp_path / "odd.png")


@pytest.mark.parametrize(
    ("panels", "message"),
    [
        ({}, r"a diagram to have at least one panel, got none; pass \{name:"),
        (
            {"m": ([0.5, 0.6], [1])},
            r"two equally long arrays \(N,\), got shapes \(2,\) and \(1,\)",
        ),
        ({"m": ([[0.5]], [[1]])}, r"two equally long arrays"),
        (
            {"m": ([0.5, 4.2], [1, 0])},
            r"confidences of panel 'm' to lie in \[0, 1\], got .* 0.5 to 4.2",
        ),
        (
            {"m": ([0.5, 0.6], [1, 3])},
            r"correct of panel 'm' to be 0 or 1, got values from 1 to 3",
        ),
    ],
)
@pytest.mark.parametrize("kind", OF_PANELS)
def test_what_does_not_fit_is_refused(
    kind: str, panels: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        OF_PANELS[kind](panels)


@pytest.mark.parametrize("most", [0, -1, 2.5, True])
def test_a_number_of_panels_that_none_can_have_is_refused(most: Any) -> None:
    probs = [[0.9, 0.1], [0.2, 0.8]]
    with pytest.raises((ValueError, TypeError), match="expected max_classes to be "):
        plots.class_reliability_grid(probs, [0, 1], max_classes=most)


def test_other_columns_and_names_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"every row to have the same columns, got \['b'\] in 'after'"
    ):
        reliability_grid({"before": {"a": sampled()}, "after": {"b": sampled()}})
    with pytest.raises(ValueError, match="class_names to be 4 names, got 1"):
        plots.class_reliability_grid(*HARD["ordinary"], class_names=["a"])
    with pytest.raises(TypeError, match="class_names to be a list, got 'abcd'; write"):
        plots.class_reliability_grid(*HARD["ordinary"], class_names="abcd")


# ---- In bins ----


def test_panel_shows_the_bins_and_states_its_numbers() -> None:
    confidences, correct = sampled(power=2)
    figure = reliability_diagram({"model": (confidences, correct)}, n_bins=10)
    lower = figure.axes[1]
    bins = bin_sums(TopLabel(confidences, correct), 10)
    shown = bins.counts > 0
    confidence, accuracy = (each[shown] for each in bins.means())
    bars = drawn_as(figure, "accuracy of the bin")
    gaps = drawn_as(figure, "gap to the mean confidence")
    np.testing.assert_allclose([bar.get_height() for bar in bars], accuracy)
    np.testing.assert_allclose([gap.get_y() for gap in gaps], accuracy)
    heights = [gap.get_height() for gap in gaps]
    np.testing.assert_allclose(heights, confidence - accuracy)
    np.testing.assert_allclose(
        [bar.get_height() for bar in lower.containers[0]], bins.counts / 3000
    )
    counts = [text.get_text() for text in lower.texts]
    assert counts == [f"{count:.0f}" for count in bins.counts[shown]]
    assert [line.get_xdata()[0] for line in lower.lines] == [
        correct.mean(),
        confidences.mean(),
    ]
    ece = top_label_error(TopLabel(confidences, correct), n_bins=10)
    assert f"ECE {ece:.3f}   accuracy {correct.mean():.3f}   N 3,000" in written(figure)


def drawn_as(figure: Figure, label: str) -> list[Any]:
    """The bars of a name in the first axes, those of no width left out."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    return list(dict(zip(labels, handles, strict=True))[label])


def test_bars_are_the_accuracy_and_outlines_reach_to_the_confidence() -> None:
    """On both sides: the accuracy of the first bin is above its confidence, and that of the other below."""
    confidences = np.repeat([0.35, 0.85], 20)
    # .7 of the first bin are right, none of the other.
    correct = np.repeat([1, 0], [14, 26])
    figure = reliability_diagram({"m": (confidences, correct)}, n_bins=10)
    bars = drawn_as(figure, "accuracy of the bin")
    gaps = drawn_as(figure, "gap to the mean confidence")
    assert [bar.get_height() for bar in bars] == pytest.approx([0.7, 0.0])
    ends = [(gap.get_y(), gap.get_y() + gap.get_height()) for gap in gaps]
    assert np.array(ends) == pytest.approx(np.array([(0.7, 0.35), (0.0, 0.85)]))
    assert [gap.get_fill() for gap in gaps] == [False, False]


def test_every_mark_is_in_the_legend_once() -> None:
    panels = {name: (np.array([0.2, 0.9] * 10), np.ones(20)) for name in "ab"}
    figure = reliability_grid({"before": panels, "after": panels}, n_bins=5)
    (legend,) = figure.legends
    assert sorted(text.get_text() for text in legend.get_texts()) == [
        "accuracy of the bin",
        "calibrated",
        "gap to the mean confidence",
        "mean confidence",
        "overall accuracy",
        "share of the rows",
    ]


@pytest.mark.parametrize("names", ["a", "ab", "abc"])
def test_the_whole_legend_is_in_the_figure(names: str) -> None:
    confidences = np.append([0.2, 0.9] * 10, 0.5)
    figure = reliability_diagram({name: (confidences, np.ones(21)) for name in names})
    figure.canvas.draw()
    (legend,) = figure.legends
    assert "fewer than 10 rows" in [each.get_text() for each in legend.get_texts()]
    extent = legend.get_window_extent()
    assert figure.bbox.containsx(extent.x0)
    assert figure.bbox.containsx(extent.x1)


def test_the_lines_at_the_means_end_below_the_numbers_of_rows() -> None:
    lower = reliability_diagram({"m": sampled(300)}).axes[1]
    ends = [line.get_window_extent().y1 for line in lower.lines]
    numbers = [text.get_window_extent().y0 for text in lower.texts]
    assert len(ends) == 2
    assert max(ends) < min(numbers)


@pytest.mark.parametrize("weight", [1.0, 0.01, 100.0])
def test_bins_of_few_rows_are_faded(weight: float) -> None:
    counts = np.array([9, 0, 10])
    sums = BinSums(
        *(weight * counts * share for share in (1, np.array([0.2, 0, 0.9]), 0.5))
    )
    figure = reliability_of_sums({"": {"m": sums}}, n_rows={"m": 19})
    bars = [bar for each in figure.axes[0].containers for bar in each]
    # The accuracy and the gap of each bin, from left to right.
    opacities = [bar.get_alpha() for bar in sorted(bars, key=lambda bar: bar.get_x())]
    assert opacities == [0.3, 0.3, 1.0, 1.0]
    (few,) = drawn_as(figure, "fewer than 10 rows")
    assert few.get_x() == 0


@pytest.mark.slow
def test_grid_places_rows_and_columns() -> None:
    rows = {
        row: {name: sampled(power=power, seed=k) for k, name in enumerate("abc")}
        for row, power in (("before", 2), ("after", 1))
    }
    figure = reliability_grid(rows, title="all of them")
    assert overlapping(figure) == []
    texts = written(figure)
    assert [
        texts.count(name) for name in ("before", "after", "a", "b", "c", "all of them")
    ] == [1] * 6
    titles = [
        axes.get_title(loc="left") for axes in figure.axes if axes.get_title(loc="left")
    ]
    eces = [
        top_label_error(TopLabel(*panel))
        for panels in rows.values()
        for panel in panels.values()
    ]
    assert [title.split()[1] for title in titles] == [f"{ece:.3f}" for ece in eces]


def test_right_is_up_and_wrong_is_down() -> None:
    (axes,) = plots.confidence_histogram(
        {"m": ([0.9, 0.9, 0.6, 0.6], [1, 1, 1, 0])}, n_bins=4
    ).axes
    found = [[bar.get_height() for bar in container] for container in axes.containers]
    assert found == [pytest.approx([0, 0, 1 / 3, 2 / 3]), pytest.approx([0, 0, -1, 0])]
    low, high = axes.get_ylim()
    assert low == -high < -1


# ---- Without bins ----


def bandwidth_limit(confidences: np.ndarray) -> float:
    return float(1.06 * confidences.std() / len(confidences) ** 0.2)


def test_the_smooth_curve_is_that_of_the_metrics_between_the_extreme_confidences() -> (
    None
):
    probs, labels = classifier(400, 2, 1, 0)
    confidences, correct = panel(probs, labels)
    figure = plots.smooth_reliability_diagram(
        {"m": (confidences, correct)}, n_resamples=5
    )
    upper, lower = figure.axes
    (line,) = (c for c in upper.collections if isinstance(c, LineCollection))
    segments = np.array(line.get_segments())
    curve = smooth_reliability(confidences, correct)
    assert curve.bandwidth < bandwidth_limit(confidences)
    shown = (curve.grid >= confidences.min()) & (curve.grid <= confidences.max())
    drawn = np.concatenate([segments[:, 0], segments[-1:, 1]]).T
    np.testing.assert_allclose(drawn, [curve.grid[shown], curve.accuracy[shown]])
    middle = (curve.density[shown][1:] + curve.density[shown][:-1]) / 2
    assert np.argmax(line.get_linewidths()) == np.argmax(middle)
    error = smooth_calibration_error(probs, labels)
    assert f"smECE {error:.3f}   accuracy {correct.mean():.3f}   N 400" in written(
        figure
    )
    means = [line.get_xdata()[0] for line in lower.lines]
    assert means == [correct.mean(), pytest.approx(confidences.mean())]


def band(figure: Figure) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Grid, lower and upper limit of the band of the first panel."""
    (filled,) = (
        c for c in figure.axes[0].collections if c.get_label().endswith("band")
    )
    vertices = filled.get_paths()[0].vertices
    grid = np.unique(vertices[:, 0])
    ends = [
        [pick(vertices[vertices[:, 0] == x, 1]) for x in grid]
        for pick in (np.min, np.max)
    ]
    return grid, *np.array(ends)


def test_the_band_holds_the_diagonal_of_a_calibrated_model_and_not_of_another() -> None:
    for power, calibrated in ((1, True), (2, False)):
        grid, low, high = band(
            plots.smooth_reliability_diagram({"m": sampled(2_000, power)})
        )
        inside = ((low <= grid) & (grid <= high))[(grid > 0.4) & (grid < 0.9)]
        assert inside.mean() > 0.8 if calibrated else inside.mean() < 0.1


def test_a_single_confidence_has_a_bar_over_its_band() -> None:
    correct = np.repeat([1.0, 0.0], [27, 3])
    figure = plots.smooth_reliability_diagram(
        {"m": (np.full(30, 0.6), correct)}, n_resamples=20
    )
    _, low, high = band(figure)
    (bar,) = figure.axes[0].containers[0].lines[2]
    ends = np.sort(bar.get_segments()[0][:, 1])
    assert ends == pytest.approx([low[0], high[0]])
    assert 0.9 - low[0] != pytest.approx(high[0] - 0.9)


def test_the_corp_diagram_draws_the_curve_and_its_parts() -> None:
    rng = np.random.default_rng(0)
    confidences = rng.uniform(0.5, 1, 600)
    correct = (rng.random(600) < confidences - 0.1).astype(float)
    upper, lower = plots.corp_diagram(
        {"m": (confidences, correct)}, n_resamples=20
    ).axes
    probs, labels = (
        np.stack([confidences, 1 - confidences], axis=1),
        (1 - correct).astype(int),
    )
    curve, parts = (
        corp_curve(probs, labels, n_resamples=1),
        corp_decomposition(probs, labels),
    )
    (drawn,) = (line for line in upper.lines if line.get_label() == "recalibrated")
    np.testing.assert_allclose(
        drawn.get_xydata().T, [curve.confidences, curve.recalibrated]
    )
    summary = f"MCB {parts.miscalibration:.4f}   DSC {parts.discrimination:.4f}"
    assert upper.get_title(loc="left").startswith(summary)
    assert sum(bar.get_height() for bar in lower.patches) == 600
    assert "90% pointwise band if calibrated" in written(upper.figure)


# ---- Classes and labels ----


def test_the_worst_classes_are_shown_and_it_says_so() -> None:
    probs, labels = classifier(600, 20, 0.6, 0)
    figure = plots.class_reliability_grid(probs, labels, n_bins=15)
    assert len(figure.axes) == 12
    assert figure.get_suptitle() == "12 of 20 classes: those with the largest error"
    sums = [
        bin_sums(TopLabel(probs[:, c], (labels == c).astype(float)), 15)
        for c in range(20)
    ]
    errors = class_gaps(BinSums(*map(np.array, zip(*sums, strict=True))))
    shown = [int(axes.texts[0].get_text()) for axes in figure.axes]
    assert shown == np.argsort(-errors)[:12].tolist()
    counts = np.bincount(labels, minlength=20)
    numbers = [axes.texts[1].get_text() for axes in figure.axes]
    assert numbers == [f"error {errors[c]:.3f}, {counts[c]} examples" for c in shown]


def test_a_class_panel_shows_its_bins_with_wilson_intervals() -> None:
    probs = np.repeat([[0.75, 0.25], [0.25, 0.75]], [40, 10], axis=0)
    labels = np.repeat([0, 1, 1, 0], [30, 10, 10, 0])
    axes = plots.class_reliability_grid(probs, labels, n_bins=2).axes[0]
    points = axes.collections[1].get_offsets()
    np.testing.assert_allclose(points, [[0.25, 0], [0.75, 0.75]])
    limits = np.array([segment[:, 1] for segment in axes.collections[0].get_segments()])
    z, n, f = (
        1.959963984540054,
        40,
        0.75,
    )  # Wilson 1927: where (f - p)^2 = z^2 p (1 - p) / n
    for p in limits[1]:
        assert (f - p) ** 2 == pytest.approx(z**2 * p * (1 - p) / n)
    assert limits[0] == pytest.approx([0, z**2 / (10 + z**2)])


# ---- Curves of a threshold ----


def test_the_risk_curve_is_that_of_the_metrics_within_its_bounds() -> None:
    confidences, correct = panel(*classifier(200, 4, 0.6, 0))
    curve, random, best = (
        plots.risk_coverage_diagram({"m": (confidences, correct)}).axes[0].lines
    )
    coverage, risk = risk_coverage_curve(confidences, correct)
    np.testing.assert_array_equal(curve.get_xydata().T, [coverage, risk])
    assert f"m (area {risk.mean():.4f})" == curve.get_label()
    assert random.get_ydata()[0] == pytest.approx(1 - correct.mean())
    assert best.get_ydata() == pytest.approx(
        np.sort(risk_coverage_curve(correct, correct).risk)
    )
    assert (
        risk >= np.interp(coverage, best.get_xdata(), best.get_ydata()) - 1e-12
    ).all()


# ---- Gammas ----


def history(n_updates: int, n_bins: int) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for update in range(1, n_updates + 1):
        entries.append({"step": 10 * update - 5, "loss": 1.0})
        entry: dict[str, Any] = {"step": 10 * update}
        for m in range(n_bins):
            entry |= {
                f"gamma_{m:02d}": 1 + 0.1 * m * update,
                f"calibration_gap_{m:02d}": 0.1 * m / update,
            }
            entry[f"count_{m:02d}"] = 60 + update
        entries.append(
            entry
            | {f"edge_{i:02d}": (i / n_bins) ** (1 / update) for i in range(n_bins + 1)}
        )
    return entries


def drawn_line(axes: Axes, number: int = 0) -> np.ndarray:
    """The values of an axes' lines of updates, beside the one at 0."""
    return [line.get_ydata() for line in axes.lines if len(line.get_xdata()) > 2][
        number
    ]


def test_each_bin_has_gap_gamma_and_edges_over_steps() -> None:
    figure = gamma_dynamics([*history(4, 6), {"eval_loss": 1.0}], title="AdaFocal")
    assert len(figure.axes) == 18
    updates = np.arange(1, 5)
    for m in range(6):
        gap, gamma, edges = figure.axes[3 * m : 3 * m + 3]
        assert gap.get_title() == f"bin {m}"
        np.testing.assert_array_equal(gap.lines[1].get_xdata(), 10 * updates)
        np.testing.assert_allclose(drawn_line(gap), 0.1 * m / updates)
        np.testing.assert_allclose(drawn_line(gamma), 1 + 0.1 * m * updates)
        np.testing.assert_allclose(drawn_line(edges, 0), (m / 6) ** (1 / updates))
        np.testing.assert_allclose(drawn_line(edges, 1), ((m + 1) / 6) ** (1 / updates))


def test_gammas_far_apart_get_a_logarithmic_axis() -> None:
    largest = 1e30  # where gammas without an upper limit end
    entries = history(3, 2)
    assert gamma_dynamics(entries).axes[1].get_yscale() == "linear"
    entries[-1]["gamma_00"], entries[-1]["gamma_01"] = -2.0, largest
    figure = gamma_dynamics(entries)
    assert {axes.get_yscale() for axes in figure.axes[1::3]} == {"symlog"}
    assert overlapping(figure) == []
    axes = figure.axes[1]
    heights = axes.transAxes.inverted().transform(
        axes.transData.transform([(0, -2.0), (0, largest)])
    )[:, 1]
    assert (np.abs(heights - [0, 1]) < 0.15).all()  # the curves fill the panel


def test_a_history_without_one_table_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"log_history to hold gammas, got no entry .*; train with loss='adafocal'",
    ):
        gamma_dynamics([{"step": 1, "gamma_00": 2.0}])
    with pytest.raises(ValueError, match="log_history to keep 15 bins, got 10"):
        gamma_dynamics(history(2, 15) + history(2, 10))


# ---- Files and global state ----


@pytest.mark.parametrize(
    ("name", "start"),
    [("a.png", b"\x89PNG"), ("folder/b.pdf", b"%PDF"), ("c.SVG", b"<?xml")],
)
def test_figures_are_written_and_no_settings_change(
    tmp_path: Path, name: str, start: bytes
) -> None:
    before = dict(mpl.rcParams)
    save_figure(reliability_diagram({"m": sampled()}), str(tmp_path / name))
    assert (tmp_path / name).read_bytes().startswith(start)
    assert [path.name for path in (tmp_path / name).parent.iterdir()] == [
        Path(name).name
    ]
    assert dict(mpl.rcParams) == before


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "diagram.png"
    path.write_bytes(b"old")
    figure = reliability_diagram({"m": sampled()})
    figure.set_size_inches(1e5, 1e5)  # more pixels than a PNG can have
    with pytest.raises(ValueError, match="too large"):
        save_figure(figure, path)
    with pytest.raises(
        ValueError, match=r"path to end in \.pdf, \.png, \.svg, got '.*diagram\.txt'"
    ):
        save_figure(figure, tmp_path / "diagram.txt")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_matplotlib_is_loaded_when_drawing_and_pyplot_never() -> None:
    code = """
import sys
import hf_calib.plots as plots
assert "matplotlib" not in sys.modules and "torch" not in sys.modules
table = {"gamma_00": 1.0, "calibration_gap_00": 0.0, "edge_00": 0.0, "edge_01": 1.0}
plots.gamma_dynamics([{"step": 1, **table}])
plots.reliability_diagram({"m": ([0.9], [1])})
assert "matplotlib" in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
