"""The calibration report of one model on one labelled dataset."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_calib import plots
from hf_calib._files import whole_folder
from hf_calib._text import counted
from hf_calib.metrics.checks import FloatArray
from hf_calib.metrics.sums import Interval
from hf_calib.plots.binned import classes_of_sums, reliability_of_sums
from hf_calib.plots.curves import risk_coverage_of_curves
from hf_calib.plots.style import some_points
from hf_calib.report import document, multi_label, sections
from hf_calib.report.diagnosis import claims, diagnose, verdict, warn
from hf_calib.report.document import (
    Block,
    Bullets,
    Cells,
    Document,
    Figures,
    Lead,
    Section,
    Table,
    draw,
)
from hf_calib.report.measured import (
    ECE_INTERVALS,
    MEASURES,
    Measured,
    Settings,
)
from hf_calib.report.rows import MOST_SORTED, Rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# In the tables.
_MOST_CLASSES = 30
_MOST_BINS = 5
# The metrics to read first, single-label and multi-label.
_FIRST = (
    "accuracy",
    "nll",
    "brier",
    "ece",
    "macro_auroc",
    "macro_nll",
    "macro_brier",
    "macro_ece",
)
_CAPTIONS = {
    "reliability": "Reliability in bins: accuracy against confidence, and the share of examples in each bin. Bins of "
    "fewer than 10 examples are faded.",
    "smooth_reliability": "Reliability without bins: smoothed accuracy with a bootstrap band.",
    "corp": "Reliability by isotonic regression (CORP); even a calibrated model leaves the pointwise band somewhere.",
    "confidence_histogram": "Confidences of correct predictions (up) and of wrong predictions (down).",
    "risk_coverage": "Error rate among the most confident predictions, against the share of them that is kept.",
    "entities": "Reliability of predicted entities, by the product and by the smallest of their tokens' probabilities.",
    "classwise": "Frequency of a class against its probability, in bins with 95% Wilson intervals.",
}
_BIN_COLUMNS: dict[str, Callable[[Any], str]] = {
    "confidence": lambda row: f"{row.lower:.3f} to {row.upper:.3f}",
    "examples": lambda row: f"{row.count:,}",
    "mean confidence": lambda row: f"{row.confidence:.3f}",
    "accuracy": lambda row: f"{row.accuracy:.3f}",
    "gap": lambda row: f"{row.gap:+.3f}",
    "part of ECE": lambda row: f"{row.contribution:.4f}",
    "p": lambda row: document.p_cell(row.p_value),
}
_CLASS_COLUMNS: dict[str, Callable[[Any], str]] = {
    "class": lambda row: str(row.name),
    "examples": lambda row: f"{row.support:,}",
    "frequency": lambda row: f"{row.frequency:.4f}",
    "mean probability": lambda row: f"{row.mean_probability:.4f}",
    "classwise ECE": lambda row: f"{row.class_gap:.4f}",
    "predicted": lambda row: f"{row.predicted:,}",
    "precision": lambda row: f"{row.precision:.3f}" if row.predicted else "",
    "confidence": lambda row: f"{row.confidence:.3f}" if row.predicted else "",
}


@dataclass(frozen=True, kw_only=True)
class CalibrationReport:
    """Metrics with intervals, tables, figures and a diagnosis in words; `calibration_report` makes one from arrays.

    Besides the states before and after calibration it may have sections, on a decision rule, on the entities of tagged
    tokens, on each dataset of out-of-distribution inputs, on soft labels, and on the slices of each column.
    """

    name: str
    class_names: tuple[str, ...]
    before: Measured
    after: Measured | None = None
    # The NLL after minus before, with its paired interval; None if only top labels are known.
    nll_change: Interval | None = None
    settings: Settings
    # (N,) int; with several labels per row (N, C) of 1, 0 and -100; None if only top labels are known.
    labels: Any = field(default=None, repr=False, compare=False)
    notes: tuple[str, ...] = ()  # further caveats, which come first in the warnings
    about: Mapping[str, Any] = field(
        default_factory=dict
    )  # rows and weights, see `hf_calib.cards.facts`
    n_files: int | None = (
        None  # the number of files of predictions, if there are several
    )
    decisions: sections.DecisionSection | None = None
    entities: sections.EntitySection | None = None
    out_of_distribution: tuple[sections.OodSection, ...] = ()
    soft_labels: sections.SoftLabelSection | None = None
    slices: tuple[sections.SliceSection, ...] = ()

    @property
    def n_examples(self) -> int:
        """The number of examples N."""
        if self.labels is None:
            return int(self.before.overall.n_examples)
        return len(self.labels)

    @property
    def multi_label(self) -> bool:
        """Whether a row has several labels, each with its own probability."""
        return self.labels is not None and self.labels.ndim == 2

    @property
    def final(self) -> Measured:
        """The measurements after calibration if there are any, otherwise those before."""
        return self.after or self.before

    @property
    def states(self) -> dict[str, Measured]:
        """The measurements by the names of their columns."""
        return document.columns(self.before, self.after)

    @property
    def panels(self) -> dict[str, Measured]:
        """The measurements by their names in figures."""
        return {
            {"value": self.name, "after": "after calibration"}.get(k, k): each
            for k, each in self.states.items()
        }

    @property
    def parts(self) -> list[sections.ReportSection]:
        """The sections that not every report has."""
        single = (
            self.decisions,
            self.entities,
            *self.out_of_distribution,
            self.soft_labels,
            *self.slices,
        )
        return [each for each in single if each is not None]

    @property
    def verdict(self) -> str:
        """One sentence: over- or under-confident by how much, or calibrated within chance."""
        return verdict(self)

    @property
    def diagnosis(self) -> tuple[str, ...]:
        """Sentences: the verdict, where the errors are, whether chance can explain them, and which slices differ."""
        return (*diagnose(self), *(each.finding for each in self.slices))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences: the caveats of the numbers."""
        of_shares = [] if self.soft_labels is None else self.soft_labels.warnings
        return (*self.notes, *of_shares, *warn(self))

    @property
    def _titles(self) -> Mapping[str, str]:
        titles = {key: measure.title for key, measure in MEASURES.items()}
        return multi_label.TITLES if self.multi_label else titles

    def to_dict(self) -> dict[str, Any]:
        """Return everything but figures and arrays in JSON types; undefined numbers are None."""
        kind: dict[str, Any] = {}
        if self.multi_label:
            kind = {
                "kind": "multi_label",
                "n_decisions": self.before.overall.n_examples,
            }
        if self.before.effective is not None:
            kind = {"weighted": True, "effective_rows": self.before.effective}
        record = {
            **kind,
            "name": self.name,
            "n_examples": self.n_examples,
            "n_files": self.n_files,
            "n_classes": len(self.class_names),
            **self.settings._asdict(),
            "before": self._record(self.before),
            "after": self.after and self._record(self.after),
            "nll_change": self.nll_change,
            "verdict": self.verdict,
            "diagnosis": self.diagnosis,
            "warnings": self.warnings,
            "decisions": self.decisions and self.decisions.to_dict(),
            "out_of_distribution": [
                each.to_dict() for each in self.out_of_distribution
            ],
            "soft_labels": self.soft_labels and self.soft_labels.to_dict(),
            "entities": self.entities and self.entities.to_dict(),
            "slices": [each.to_dict() for each in self.slices],
            "about": self.about,
        }
        return dict(document.plain(record))

    def _record(self, measured: Measured) -> dict[str, Any]:
        titled = document.titled
        record: dict[str, Any] = {
            "metrics": titled(measured.metrics, self._titles),
            "bins": measured.bins,
        }
        for key, metric in record["metrics"].items():
            metric["n_resamples"] = measured.n_resamples.get(key, 0)
        if not self.multi_label:
            return record | {
                "overall": {
                    **measured.overall._asdict(),
                    "verdict": claims(self, measured).verdict,
                },
                "consistency_test": measured.consistency,
                "classes": measured.classes,
            }
        titles = {"prevalence": "Prevalence", **multi_label.LABEL_MEASURES}
        labels = [
            {**vars(each), "metrics": titled(each.metrics, titles)}
            for each in measured.labels
        ]
        return record | {"gap": Interval(*measured.overall[:3]), "labels": labels}

    def summary(self) -> str:
        """One line on the examples, the bins and the intervals."""
        settings = self.settings
        keys = ("name", "split", "part")
        words = [str(self.about[key]) for key in keys if self.about.get(key)]
        of = f"{', '.join(words)}: " if words else ""
        files = "" if self.n_files is None else f" in {counted(self.n_files, 'file')}"
        counts = [f"{counted(self.n_examples, 'example')}{files}"]
        n_names = len(self.class_names)
        if self.multi_label:
            n_decisions = self.before.overall.n_examples
            counts += [counted(n_names, "label"), counted(n_decisions, "decision")]
        elif n_names > 0:
            counts.append(counted(n_names, "class"))
        else:
            counts.append("top labels only")
        bins = counted(settings.n_bins, "equal-width bin")
        counts.append(f"ECE in {bins}")
        drawn = "without resamples of examples"
        if self.before.are_resampled:
            drawn = f"from {counted(settings.n_resamples, 'resample')}"
        intervals = f"{settings.level} intervals {drawn}, seed {settings.seed}."
        end = "" if self.multi_label else f" {ECE_INTERVALS}"
        return f"{of}{', '.join(counts)}; {intervals}{end}"

    def metric_table(self, keys: Collection[str] = ()) -> Cells:
        """The metrics of these keys, or all and the consistency test, with their intervals, before and after."""
        titles = {
            key: title for key, title in self._titles.items() if not keys or key in keys
        }
        metrics = {name: each.metrics for name, each in self.states.items()}
        header, rows = document.table_of("metric", titles, metrics)
        tests = [
            each.consistency
            for each in self.states.values()
            if each.consistency is not None
        ]
        if tests and not keys:
            p_values = [document.p_cell(test.p_value) for test in tests]
            rows.append(["Consistency test of the ECE (p)", *p_values])
        return header, rows

    def footnotes(self) -> list[str]:
        """Sentences on how to read the tables, and on metrics that they leave out."""
        if self.multi_label:
            return list(multi_label.FOOTNOTES)
        kind = "bootstrap" if self.before.are_resampled else "normal"
        notes = [
            "Noise makes every calibration error larger, and more so with fewer examples. ECEs have intervals by test "
            f"inversion, other errors have none, and other metrics {kind} ones.",
            "A gap is confidence minus accuracy, above 0 if over-confident. p is the probability of a gap at least as "
            "large if the true gap is 0, without a correction for the number of rows. The classwise ECE of a class is "
            "the mean distance, over bins, between its probability and its frequency, and has no sign.",
        ]
        if self.before.are_resampled:
            notes.append(
                "The kernel ECE is computed for 2 to 2,000 examples. The area under the risk-coverage curve is "
                "resampled at most 200 times, and not above 200,000 examples."
            )
            return notes
        notes.append(
            "Examples are not resampled if they have weights, or if they are more than 200,000 or have more than "
            "67,108,864 probabilities."
        )
        if self.n_examples > MOST_SORTED:
            notes.append(
                "With more than 1,000,000 examples, the adaptive ECE and the area under the risk-coverage curve are "
                "from counts of confidences in 105,728 cells; confidences in one cell count as equal."
            )
        missing = [
            self._titles[key] for key in MEASURES if key not in self.before.metrics
        ]
        notes.append(
            "Left out, because they take too long for so many examples, or have no weighted form: "
            f"{'; '.join(missing)}."
        )
        effective = self.before.effective
        if effective is not None:
            notes.append(
                f"The weighted examples are worth {effective:,.0f} unweighted ones, (sum of weights)^2 / (sum of "
                "squared weights), the number for intervals and tests (Kish 1965). The examples of a bin are rows; "
                "those of a class are weights, scaled to the number of rows."
            )
        return notes

    def short(self) -> Document:
        """The verdict, the metrics to read first, caveats, and the parts that not every report has: for a screen."""
        table = Table(
            "", *self.metric_table(_FIRST), title=f"Calibration report: {self.name}"
        )
        means = (
            "mean probability minus frequency"
            if self.multi_label
            else "mean confidence minus accuracy"
        )
        said = (
            [f"Points: {means}, in percentage points."]
            if "points" in self.verdict
            else []
        )
        said += [
            *(each.finding for each in self.slices),
            *(f"Note: {each}" for each in self.warnings),
        ]
        words = Bullets(
            [self.summary(), *said, "Use --all to see all metrics and the diagnosis."]
        )
        parts = [each.block(self.settings.level) for each in self.parts]
        return Document("", [Lead(self.verdict, strong=True), table, words, *parts])

    def document(self, *, with_figures: bool = False) -> Document:
        """The report as blocks, for any form; figures take longer than everything else."""
        title = f"Calibration report: {self.name}"
        level = self.settings.level
        blocks: list[Block] = [Lead(self.verdict, strong=True), Lead(self.summary())]
        blocks.append(Section("Diagnosis", [Bullets(self.diagnosis[1:])]))
        if self.warnings:
            blocks.append(Section("Caveats", [Bullets(self.warnings, label="Note: ")]))
        if with_figures:
            images = {name: draw(figure) for name, figure in self.figures().items()}
            captions = _CAPTIONS | (multi_label.CAPTIONS if self.multi_label else {})
            of_slices = (
                f"Confidence minus accuracy of each slice, with {level} intervals."
            )
            captions |= {each.figure_name: of_slices for each in self.slices}
            blocks.append(Section("Figures", [Figures(images, captions)]))
        links = {measure.title: measure.page for measure in MEASURES.values()}
        found = self.metric_table()
        metrics = Table(
            f"Metrics with their {level} intervals", *found, title=title, links=links
        )
        blocks.append(
            Section("Metrics", [metrics, Bullets(self.footnotes(), faint=True)])
        )
        blocks += [each.block(level) for each in self.parts]
        state = "" if self.after is None else ", after calibration"
        if self.multi_label:
            labels = Table(
                f"Labels with their {level} intervals", *multi_label.label_table(self)
            )
            blocks.append(Section(f"Labels{state}", [labels]))
        else:
            rows = sorted(
                self.final.classes, key=lambda row: (-row.class_gap, row.index)
            )[:_MOST_CLASSES]
            worst = sorted(
                self.final.bins, key=lambda row: (-row.contribution, row.lower)
            )[:_MOST_BINS]
            bins = Table(
                "Bins that add most to the ECE",
                *document.table_of_rows(worst, _BIN_COLUMNS),
            )
            largest = f"{len(rows)} classes, those with the largest classwise ECE first"
            classes = Table(largest, *document.table_of_rows(rows, _CLASS_COLUMNS))
            blocks.append(
                Section(f"Bins that add most to the calibration error{state}", [bins])
            )
            if rows:
                blocks.append(Section(f"Classes{state}", [classes]))
        written = datetime.now(timezone.utc).date().isoformat()
        blocks.append(
            Bullets(
                [f"Written by hf_calib {version('hf_calib')} on {written}."], faint=True
            )
        )
        return Document(title, blocks)

    def figures(self) -> dict[str, Figure]:
        """Matplotlib figures by name, drawn when this is called; see `hf_calib.plots` for each."""
        if self.multi_label:
            return multi_label.draw_labels(self)
        found = _draw(self)
        for each in self.parts:
            found |= each.figures(self.settings.n_bins)
        return found

    def save(self, folder: Path | str) -> None:
        """Write `report.md`, `report.html`, `report.json` and `figures/*.png` to a folder, completely or not at all."""
        with whole_folder(Path(folder)) as made:
            self.document(with_figures=True).write(made, self.to_dict())

    def to_markdown(self) -> str:
        """The report as a Markdown document, without figures."""
        return self.document().to_markdown()

    def to_html(self) -> str:
        """The report as one HTML document that needs no other file: styles and figures are inside."""
        return self.document(with_figures=True).to_html()

    def _repr_html_(self) -> str:
        """The page for notebooks, in a frame, because its styles are for a separate page."""
        return f'<iframe srcdoc="{escape(self.to_html())}" style="width: 100%; height: 40rem; border: 0"></iframe>'


def _draw(report: CalibrationReport) -> dict[str, Figure]:
    """The figures by name of rows with one label each."""
    _, level, _, seed = report.settings
    rows: dict[str, Any] = {name: each.rows for name, each in report.panels.items()}
    tops = {name: each.top for name, each in rows.items()}
    bins = {name: each.bins("uniform") for name, each in rows.items()}
    n_rows = {name: len(each) for name, each in rows.items()}
    found = {"reliability": reliability_of_sums({"": bins}, n_rows=n_rows)}
    final: Rows = [*rows.values()][-1]
    if not final.are_sorted:
        curves = {name: _risk_curve(each) for name, each in rows.items()}
        found["risk_coverage"] = risk_coverage_of_curves(curves)
    else:
        found["risk_coverage"] = plots.risk_coverage_diagram(tops)
        found["smooth_reliability"] = plots.smooth_reliability_diagram(
            tops, confidence_level=level, seed=seed
        )
        found["corp"] = plots.corp_diagram(tops, seed=seed)
        found["confidence_histogram"] = plots.confidence_histogram(tops)
    if final.classes is not None:
        found["classwise"] = classes_of_sums(final.classes.bins, report.class_names)
    return {name: found[name] for name in _CAPTIONS if name in found}


def _risk_curve(rows: Rows) -> tuple[FloatArray, FloatArray]:
    """The coverages, and the error rates of the kept weights, most confident first."""
    counts, _, right = rows.by_confidence()[:, ::-1]
    kept = np.cumsum(counts)
    errors = np.cumsum(counts - right)
    # A row without weight before all others has no rate.
    used = np.flatnonzero(kept > 0)
    shown = used[some_points(len(used))]
    return kept[shown] / kept[-1], errors[shown] / kept[shown]
