"""The pictures: what they show, that it can be read, and that nothing outside the figure changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_calib.metrics.sums import TopLabel, bin_sums, top_label_error
from hf_calib.plots import gamma_dynamics, reliability_diagram, reliability_grid, save_figure
from tests.helpers.pictures import overlapping, written

Panel = tuple[np.ndarray, np.ndarray]


def predictions(n_examples: int = 3000, power: float = 1.0, seed: int = 0) -> Panel:
    """Predictions that are right with probability confidence ** power."""
    rng = np.random.default_rng(seed)
    confidences = rng.uniform(0.3, 1, n_examples)
    return confidences, (rng.random(n_examples) < confidences**power).astype(float)


# Reliability diagrams


def test_panel_shows_the_bins() -> None:
    confidences, correct = predictions(power=2)
    figure = reliability_diagram({"model": (confidences, correct)}, n_bins=10)
    upper, lower = figure.axes
    bins = bin_sums(TopLabel(confidences, correct), 10)
    shown = bins.counts > 0
    common, over, under = (
        np.array([[bar.get_y(), bar.get_height()] for bar in container]).T for container in upper.containers
    )
    confidence, accuracy = (each[shown] for each in bins.means())
    np.testing.assert_allclose(common[1], np.minimum(accuracy, confidence))
    np.testing.assert_allclose(over.sum(axis=0), confidence)
    np.testing.assert_allclose(under.sum(axis=0), accuracy)
    shares = [bar.get_height() for bar in lower.containers[0]]
    np.testing.assert_allclose(shares, bins.counts / 3000)
    counts = [text.get_text() for text in lower.texts]
    assert counts == [f"{count:.0f}" for count in bins.counts[shown]]
    overall, stated = (line.get_xdata()[0] for line in lower.lines)
    assert overall == correct.mean()
    assert stated == confidences.mean()


def test_panel_states_its_numbers() -> None:
    confidences, correct = predictions()
    figure = reliability_diagram({"model": (confidences, correct)}, n_bins=7)
    ece = top_label_error(TopLabel(confidences, correct), n_bins=7)
    assert f"ECE {ece:.3f}   accuracy {correct.mean():.3f}   N 3,000" in written(figure)


def test_large_counts_are_short() -> None:
    confidences = np.repeat([0.1, 0.5, 0.9], [9_999, 10_400, 1_234_567])
    figure = reliability_diagram({"model": (confidences, np.ones_like(confidences))}, n_bins=3)
    assert [text.get_text() for text in figure.axes[1].texts] == ["9999", "10k", "1.2M"]


def test_numbers_too_small_to_read_are_left_out() -> None:
    figure = reliability_diagram({"model": predictions()}, n_bins=50)
    assert len(figure.axes[1].texts) == 0


def test_grid_places_rows_and_columns() -> None:
    rows = {
        row: {name: predictions(power=power, seed=k) for k, name in enumerate("abc")}
        for row, power in (("before", 2), ("after", 1))
    }
    figure = reliability_grid(rows, title="all of them")
    assert len(figure.axes) == 2 * 2 * 3
    texts = written(figure)
    for name in ("before", "after", "a", "b", "c", "all of them"):
        assert texts.count(name) == 1
    titles = [axes.get_title(loc="left") for axes in figure.axes if axes.get_title(loc="left")]
    eces = [top_label_error(TopLabel(*panel)) for panels in rows.values() for panel in panels.values()]
    assert [title.split()[1] for title in titles] == [f"{ece:.3f}" for ece in eces]


LONG_NAME = "a fine-tuned checkpoint with_a_name_that_nobody_would_choose_but_a_script"


SIDE_BY_SIDE = {LONG_NAME: predictions(20_000, 3), "b": predictions(1), "c": predictions(9_000, 0.2)}


@pytest.mark.parametrize(
    ("rows", "n_bins"),
    [
        ({"": {"one": predictions()}}, 1),
        ({"": {"one": predictions()}}, 25),
        ({"": SIDE_BY_SIDE}, 15),
        ({row: {name: predictions(90_000) for name in "abcd"} for row in ("before T", "after T")}, 8),
    ],
    ids=["one_bin", "many_bins", "side_by_side", "grid"],
)
def test_no_text_covers_another(rows: dict[str, dict[str, Panel]], n_bins: int) -> None:
    assert overlapping(reliability_grid(rows, n_bins=n_bins, title="Reliability")) == []


def test_names_are_text_not_formulas(tmp_path: Path) -> None:
    figure = reliability_diagram({r"$\frac{$ & <b>": predictions()}, title=r"\undefined $x^$")
    save_figure(figure, tmp_path / "odd.png")
    assert r"$\frac{$ & <b>" in written(figure)


def test_extreme_predictions_are_drawn(tmp_path: Path) -> None:
    panels = {
        "one example": ([0.7], [True]),
        "all certain and wrong": (np.ones(5), np.zeros(5)),
        "all at zero": (np.zeros(5), np.ones(5)),
    }
    save_figure(reliability_diagram(panels), tmp_path / "extreme.png")
    assert (tmp_path / "extreme.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("panel", "message"),
    [
        (([0.5, 0.6], [1]), r"panel 'm' to be two equally long arrays \(N,\), got shapes \(2,\) and \(1,\)"),
        (([], []), r"two equally long arrays"),
        (([[0.5]], [[1]]), r"two equally long arrays"),
        (([0.5, 4.2], [1, 0]), r"confidences of panel 'm' to lie in \[0, 1\], got values from 0.5 to 4.2"),
        (([0.5, np.nan], [1, 0]), r"confidences of panel 'm' to lie in \[0, 1\]"),
        (([0.5, 0.6], [1, 3]), r"correct of panel 'm' to be 0 or 1, got values from 1 to 3"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(panel: Panel, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reliability_diagram({"m": panel})


def test_a_diagram_needs_panels_in_even_rows() -> None:
    for draw in (lambda: reliability_diagram({}), lambda: reliability_grid({})):
        with pytest.raises(ValueError, match=r"at least one panel, got none; pass \{name:"):
            draw()
    with pytest.raises(ValueError, match=r"every row to have the same columns, got \['b'\] in 'after'"):
        reliability_grid({"before": {"a": predictions()}, "after": {"b": predictions()}})


# Gammas


def history(n_updates: int, n_bins: int, *, with_edges: bool = True) -> list[dict[str, float]]:
    entries: list[dict[str, float]] = []
    for update in range(1, n_updates + 1):
        entries.append({"step": 10 * update - 5, "loss": 1.0})
        entries.append(
            {
                "step": 10 * update,
                **{f"gamma_{m:02d}": 1 + 0.1 * m * update for m in range(n_bins)},
                **{f"calibration_gap_{m:02d}": 0.1 * m / update for m in range(n_bins)},
            }
        )
        if with_edges:
            entries[-1] |= {f"edge_{i:02d}": (i / n_bins) ** (1 / update) for i in range(n_bins + 1)}
            entries[-1] |= {f"count_{m:02d}": 60 + update for m in range(n_bins)}
    return entries


def drawn_line(axes: Axes, number: int = 0) -> np.ndarray:
    """The values of an axes' lines of updates, beside the one at 0."""
    return [line.get_ydata() for line in axes.lines if len(line.get_xdata()) > 2][number]


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
        assert [text.get_text() for text in edges.texts] == ["n 61 to 64"]
    # Bins can be compared: their axes are the same, and nothing is cut off.
    for kind in range(3):
        (limits,) = {axes.get_ylim() for axes in figure.axes[kind::3]}
        lines = [drawn_line(axes) for axes in figure.axes[kind::3]]
        assert limits[0] <= np.min(lines) < np.max(lines) <= limits[1]


def test_histories_of_earlier_versions_have_no_edges() -> None:
    figure = gamma_dynamics(history(4, 15, with_edges=False))
    assert len(figure.axes) == 30
    np.testing.assert_allclose(drawn_line(figure.axes[2 * 7 + 1]), 1 + 0.7 * np.arange(1, 5))


def test_a_training_that_went_on_with_a_later_version() -> None:
    figure = gamma_dynamics(history(2, 2, with_edges=False) + history(4, 2)[4:])
    assert np.isnan(drawn_line(figure.axes[2])).tolist() == [True, True, False, False]
    assert [text.get_text() for text in figure.axes[2].texts] == ["n 63 to 64"]


@pytest.mark.parametrize(("n_updates", "n_bins", "with_edges"), [(1, 1, True), (3, 15, True), (3, 15, False)])
@pytest.mark.slow
def test_gamma_pictures_can_be_read(n_updates: int, n_bins: int, with_edges: bool) -> None:
    figure = gamma_dynamics(history(n_updates, n_bins, with_edges=with_edges), title="AdaFocal")
    assert overlapping(figure) == []


@pytest.mark.parametrize("largest", [150.0, 5e3, 1e30])  # without an upper limit they end at 1e30
def test_gammas_far_apart_get_a_logarithmic_axis(largest: float) -> None:
    entries = history(3, 2)
    assert gamma_dynamics(entries).axes[1].get_yscale() == "linear"
    entries[-1]["gamma_00"], entries[-1]["gamma_01"] = -2.0, largest
    figure = gamma_dynamics(entries)
    assert {axes.get_yscale() for axes in figure.axes[1::3]} == {"symlog"}
    assert overlapping(figure) == []
    panel = figure.axes[1]
    heights = panel.transAxes.inverted().transform(panel.transData.transform([(0, -2.0), (0, largest)]))[:, 1]
    assert (np.abs(heights - [0, 1]) < 0.15).all()  # the curves fill the panel


def test_gaps_of_empty_bins_may_be_missing() -> None:
    entries = history(3, 2)
    entries[1]["calibration_gap_00"] = float("nan")
    entries[3]["calibration_gap_00"] = None
    figure = gamma_dynamics(entries)
    assert np.isnan(drawn_line(figure.axes[0])).tolist() == [True, True, False]


@pytest.mark.parametrize(
    "log_history",
    [
        [],
        [{"step": 1, "loss": 2.0}],
        [{"step": 1, "gamma_00": 2.0}],
        [{"gamma_00": 1.0, "calibration_gap_00": 0.0}],
    ],
)
def test_a_history_without_gammas_is_refused(log_history: list[dict[str, float]]) -> None:
    with pytest.raises(
        ValueError, match=r"log_history to hold gammas, got no entry .*; train with loss='adafocal'"
    ):
        gamma_dynamics(log_history)


def test_a_history_of_two_tables_is_refused() -> None:
    with pytest.raises(ValueError, match="log_history to keep 15 bins, got 10"):
        gamma_dynamics(history(2, 15) + history(2, 10))


# Files and global state


@pytest.mark.parametrize(
    ("name", "start"), [("a.png", b"\x89PNG"), ("folder/b.pdf", b"%PDF"), ("c.SVG", b"<?xml")]
)
def test_figures_are_written(tmp_path: Path, name: str, start: bytes) -> None:
    save_figure(reliability_diagram({"m": predictions()}), str(tmp_path / name))
    assert (tmp_path / name).read_bytes().startswith(start)
    assert [path.name for path in (tmp_path / name).parent.iterdir()] == [Path(name).name]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "diagram.png"
    path.write_bytes(b"old")
    figure = reliability_diagram({"m": predictions()})
    figure.set_size_inches(1e5, 1e5)  # more pixels than a PNG can have
    with pytest.raises(ValueError, match="too large"):
        save_figure(figure, path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_unknown_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"path to end in \.pdf, \.png, \.svg, got '.*diagram\.txt'"):
        save_figure(Figure(), tmp_path / "diagram.txt")
    assert list(tmp_path.iterdir()) == []


def test_drawing_changes_no_settings(tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    save_figure(reliability_diagram({"m": predictions()}), tmp_path / "a.png")
    assert dict(mpl.rcParams) == before


def test_matplotlib_is_loaded_when_drawing_and_pyplot_never() -> None:
    code = """
import sys
import hf_calib.plots as plots
assert "matplotlib" not in sys.modules and "torch" not in sys.modules
plots.gamma_dynamics([{"step": 1, "gamma_00": 1.0, "calibration_gap_00": 0.0}])
plots.reliability_diagram({"m": ([0.9], [1])})
assert "matplotlib" in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_of_many_bins_some_are_drawn_in_their_order() -> None:
    figure = gamma_dynamics(history(3, 102, with_edges=False))
    titles = [axes.get_title() for axes in figure.axes[::2]]
    assert (len(titles), titles[0], titles[-1]) == (20, "bin 0", "bin 101")
    last = [drawn_line(axes)[-1] for axes in figure.axes[1::2]]
    assert last == sorted(last)
