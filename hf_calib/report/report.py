"""The calibration report of one model on one labelled dataset."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
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
    titled,
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

_TITLES = {key: measure.title for key, measure in MEASURES.items()}
# In the tables.
_MOST_CLASSES = 30
_MOST_BINS = 5
# The metrics to read first, single-label and multi-label.
# What the metrics to read first say, after their titles.
_MEANINGS = {
    "accuracy": "the share of predictions that are right.",
    "nll": "the mean of -log p of the label; lower is better, and it sees every class.",
    "brier": "the mean squared distance of the probabilities from the label, from 0 to 2.",
    "ece": "how far confidence is from accuracy on average, over bins of the confidence.",
}
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
    "reliability": "Reliability in bins: accuracy against confidence, and the share of examples in "
    "each bin. Bins of fewer than 10 examples are faded.",
    "smooth_reliability": "Reliability without bins: smoothed accuracy with a bootstrap band.",
    "corp": "Reliability by isotonic regression (CORP); even a calibrated model leaves the "
    "pointwise band somewhere.",
    "confidence_histogram": "Confidences of correct predictions (up) and of wrong predictions "
    "(down).",
    "risk_coverage": "Error rate among the most confident predictions, against the share of them "
    "that is kept.",
    "entities": "Reliability of predicted entities, by the product and by the smallest of their "
    "tokens' probabilities.",
    "classwise": "Frequency of a class against its probability, in bins with 95% Wilson intervals.",
}
# The columns of tables: a header, and the attribute of a row with its form.
_BIN_COLUMNS = {
    "confidence": ("range", ""),
    "examples": ("count", ","),
    "mean confidence": ("confidence", ".3f"),
    "accuracy": ("accuracy", ".3f"),
    "gap": ("gap", "+.3f"),
    "part of ECE": ("contribution", ".4f"),
    "p": ("p_value", "p"),
}
_CLASS_COLUMNS = {
    "class": ("name", ""),
    "examples": ("support", ","),
    "frequency": ("frequency", ".4f"),
    "mean probability": ("mean_probability", ".4f"),
    "classwise ECE": ("class_gap", ".4f"),
    "predicted": ("predicted", ","),
    "precision": ("precision", ".3f"),
    "confidence": ("confidence", ".3f"),
}


@dataclass(frozen=True, kw_only=True)
class CalibrationReport:
    """Metrics with intervals, tables, figures and words; `calibration_report` makes it from arrays.

    Besides the states before and after calibration it may have sections, on a decision rule, on the
    entities of tagged tokens, on each dataset of out-of-distribution inputs, on soft labels, and on
    the slices of each column.
    """

    name: str
    class_names: tuple[str, ...]
    before: Measured
    after: Measured | None = None
    # The NLL after minus before, with its paired interval; None if only top labels are known.
    nll_change: Interval | None = None
    settings: Settings
    # (N,) int; with several labels per row (N, C) of 1, 0 and -100; None if only top labels are
    # known.
    labels: Any = field(default=None, repr=False, compare=False)
    notes: tuple[str, ...] = ()  # further caveats, which come first in the warnings
    # Rows and weights, see `hf_calib.cards.facts`.
    about: Mapping[str, Any] = field(default_factory=dict)
    # The number of files of predictions, if there are several.
    n_files: int | None = None
    decisions: sections.DecisionSection | None = None
    entities: sections.EntitySection | None = None
    out_of_distribution: tuple[sections.OodSection, ...] = ()
    soft_labels: sections.SoftLabelSection | None = None
    slices: tuple[sections.SliceSection, ...] = ()

    @property
    def n_examples(self) -> int:
        """The number of examples N."""
        # Several labels per row are as many examples for the gap, which is of all decisions.
        if self.multi_label:
            return len(self.labels)
        return int(self.before.overall.n_examples)

    @property
    def multi_label(self) -> bool:
        """Whether a row has several labels, each with its own probability."""
        return len(self.before.labels) > 0

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
        if self.after is None:
            return {self.name: self.before}
        return {"before": self.before, "after calibration": self.after}

    @property
    def parts(self) -> list[sections.ReportSection]:
        """The sections that not every report has."""
        found: list[Any] = [self.decisions, self.entities]
        found += [*self.out_of_distribution, self.soft_labels, *self.slices]
        return [each for each in found if each is not None]

    @property
    def verdict(self) -> str:
        """One sentence: over- or under-confident by how much, or calibrated within chance."""
        return verdict(self)

    @property
    def diagnosis(self) -> tuple[str, ...]:
        """Sentences: the verdict, the errors, whether by chance, and slices that differ."""
        return (*diagnose(self), *(each.finding for each in self.slices))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences: the caveats of the numbers."""
        of_shares = [] if self.soft_labels is None else self.soft_labels.warnings
        return (*self.notes, *of_shares, *warn(self))

    @property
    def _titles(self) -> Mapping[str, str]:
        """The titles of the metrics by key."""
        return multi_label.TITLES if self.multi_label else _TITLES

    def to_dict(self) -> dict[str, Any]:
        """Return everything but figures and arrays in JSON types; undefined numbers are None."""
        kind: dict[str, Any] = {}
        if self.multi_label:
            n_decisions = self.before.overall.n_examples
            kind = {"kind": "multi_label", "n_decisions": n_decisions}
        if self.before.effective is not None:
            kind = {"weighted": True, "effective_rows": self.before.effective}
        record = {
            **kind,
            "name": self.name,
            "n_examples": self.n_examples,
            "n_files": self.n_files,
            "n_classes": len(self.class_names),
            **self.settings._asdict(),
            "n_resamples": self._n_resamples,
            "before": self._record(self.before),
            "after": self.after and self._record(self.after),
            "nll_change": self.nll_change,
            "verdict": self.verdict,
            "diagnosis": self.diagnosis,
            "warnings": self.warnings,
            "decisions": self.decisions,
            "out_of_distribution": self.out_of_distribution,
            "soft_labels": self.soft_labels,
            "entities": self.entities,
            "slices": self.slices,
            "about": self.about,
        }
        return dict(document.plain(record))

    def _record(self, measured: Measured) -> dict[str, Any]:
        """The record of one set of probabilities."""
        metrics = titled(measured.metrics, self._titles)
        for key, metric in metrics.items():
            metric["n_resamples"] = measured.n_resamples[key]
        record = {"metrics": metrics, "bins": measured.bins}
        overall = measured.overall
        if self.multi_label:
            gap = Interval(overall.gap, overall.low, overall.high)
            labels = [multi_label.record(each) for each in measured.labels]
            return {**record, "gap": gap, "labels": labels}
        said = claims(self, measured).verdict
        return {
            **record,
            "overall": {**overall._asdict(), "verdict": said},
            "consistency_test": measured.consistency,
            "classes": measured.classes,
        }

    @property
    def _n_resamples(self) -> int:
        """The number of resamples that were drawn."""
        return self.settings.n_resamples if self.before.are_resampled else 0

    def summary(self) -> str:
        """One line on the examples, the bins and the intervals."""
        settings = self.settings
        # A report made in Python has no such facts.
        known = [self.about.get(key) for key in ("name", "split", "part")]
        words = ", ".join(str(each) for each in known if each)
        of = f"{words}: " if words else ""
        examples = counted(self.n_examples, "example")
        if self.n_files is not None:
            examples += f" in {counted(self.n_files, 'file')}"
        n_names = len(self.class_names)
        if self.multi_label:
            decisions = counted(self.before.overall.n_examples, "decision")
            classes = f"{counted(n_names, 'label')}, {decisions}"
        elif n_names > 0:
            classes = counted(n_names, "class")
        else:
            classes = "top labels only"
        drawn = "without resamples of examples"
        if self.before.are_resampled:
            drawn = f"from {counted(settings.n_resamples, 'resample')}"
        bins = f"ECE in {counted(settings.n_bins, 'equal-width bin')}"
        intervals = f"{settings.level} intervals {drawn}, seed {settings.seed}."
        end = "" if self.multi_label else f" {ECE_INTERVALS}"
        return f"{of}{examples}, {classes}, {bins}; {intervals}{end}"

    def metric_table(self, keys: Collection[str] = ()) -> Cells:
        """The metrics of these keys, or all and the consistency test, before and after."""
        states = self.states
        titles = self._titles
        if keys:
            titles = {key: title for key, title in titles.items() if key in keys}
        metrics = {name: each.metrics for name, each in states.items()}
        header, rows = document.table_of("metric", titles, metrics)
        if not keys and not self.multi_label:
            tests: Any = [each.consistency for each in states.values()]
            p_values = [document.p_cell(test.p_value) for test in tests]
            rows.append(["Consistency test of the ECE (p)", *p_values])
        return header, rows

    def footnotes(self) -> list[str]:
        """Sentences on how to read the tables, and on metrics that they leave out."""
        if self.multi_label:
            return list(multi_label.FOOTNOTES)
        are_resampled = self.before.are_resampled
        kind = "bootstrap" if are_resampled else "normal"
        found = self.before.metrics
        missing = [title for key, title in self._titles.items() if key not in found]
        effective = self.before.effective or 0.0
        sentences = [
            (
                True,
                "Noise makes every calibration error larger, and more so with fewer examples. "
                "ECEs have intervals by test inversion, other errors have none, and other metrics "
                f"{kind} ones.",
            ),
            (
                True,
                "A gap is confidence minus accuracy, above 0 if over-confident. p is the "
                "probability of a gap at least as large if the true gap is 0, without a "
                "correction for the number of rows. The classwise ECE of a class is the mean "
                "distance, over bins, between its probability and its frequency, and has no sign.",
            ),
            (
                are_resampled,
                "The kernel ECE is computed for 2 to 2,000 examples. The area under the "
                "risk-coverage curve is resampled at most 200 times, and not above 200,000 "
                "examples.",
            ),
            (
                not are_resampled,
                "Examples are not resampled if they have weights, or if they are more than "
                "200,000 or have more than 67,108,864 probabilities.",
            ),
            (
                not are_resampled and self.n_examples > MOST_SORTED,
                "With more than 1,000,000 examples, the adaptive ECE and the area under the "
                "risk-coverage curve are from counts of confidences in 105,728 cells; confidences "
                "in one cell count as equal.",
            ),
            (
                not are_resampled,
                "Left out, because they take too long for so many examples, or have no weighted "
                f"form: {'; '.join(missing)}.",
            ),
            (
                effective > 0,
                f"The weighted examples are worth {effective:,.0f} unweighted ones, (sum of "
                "weights)^2 / (sum of squared weights), the number for intervals and tests (Kish "
                "1965). The examples of a bin are rows; those of a class are weights, scaled to "
                "the number of rows.",
            ),
        ]
        return [sentence for holds, sentence in sentences if holds]

    def short(self) -> Document:
        """The verdict, the metrics to read first, caveats and sections: for a screen."""
        table = Table("", *self.metric_table(_FIRST), title=self._heading)
        means = "mean confidence minus accuracy"
        if self.multi_label:
            means = "mean probability minus frequency"
        sentences = [self.summary()]
        if "points" in self.verdict:
            sentences.append(f"Points: {means}, in percentage points.")
        sentences += [each.finding for each in self.slices]
        sentences += [f"Note: {each}" for each in self.warnings]
        sentences.append("Use --all to see all metrics and the diagnosis.")
        parts = self._blocks_of_parts()
        lead = Lead(self.verdict, strong=True)
        return Document("", [lead, table, Bullets(sentences), *parts])

    @property
    def _heading(self) -> str:
        return f"Calibration report: {self.name}"

    def _blocks_of_parts(self) -> list[Block]:
        return [each.block(self.settings.level) for each in self.parts]

    def document(self, *, with_figures: bool = False) -> Document:
        """The report as blocks, for any form; figures take longer than everything else."""
        level = self.settings.level
        caption = f"Metrics with their {level} intervals"
        first = Table(caption, *self.metric_table(_FIRST))
        titles = self._titles
        meanings = [
            f"{titles[key]}: {said}" for key, said in _MEANINGS.items() if key in titles
        ]
        blocks: list[Block] = []
        # Whoever asked for a rule reads it first.
        parts = self._blocks_of_parts()
        if self.decisions is not None:
            blocks.append(parts.pop(0))
        blocks += [
            Lead(self.verdict, strong=True),
            Lead(self.summary()),
        ]
        notes = [Bullets(meanings, faint=True)] if meanings else []
        blocks.append(Section("In short", [first, *notes]))
        warnings = self.warnings
        if warnings:
            blocks.append(Section("Caveats", [Bullets(warnings, label="Note: ")]))
        if with_figures:
            blocks.append(Section("Figures", [self._drawn()]))
        diagnosis = Bullets(self.diagnosis[1:])
        blocks.append(Section("Diagnosis", [diagnosis], folded=True))
        metrics = Table(caption, *self.metric_table(), title=self._heading)
        reading = Bullets(self.footnotes(), faint=True)
        blocks.append(Section("Metrics", [metrics, reading], folded=True))
        blocks += parts
        blocks += self._tables()
        written = datetime.now(timezone.utc).date().isoformat()
        end = f"Written by hf_calib {version('hf_calib')} on {written}."
        blocks.append(Bullets([end], faint=True))
        return Document(self._heading, blocks)

    def _drawn(self) -> Figures:
        """The figures, drawn, with their captions."""
        images = {name: draw(figure) for name, figure in self.figures().items()}
        level = self.settings.level
        of_slices = f"Confidence minus accuracy of each slice, with {level} intervals."
        captions = multi_label.CAPTIONS if self.multi_label else _CAPTIONS
        # Each column has a figure of its own name.
        own = {each.figure_name: of_slices for each in self.slices}
        return Figures(images, {**captions, **own})

    def _tables(self) -> Iterator[Section]:
        """The tables of the labels, or of the bins and the classes."""
        state = "" if self.after is None else ", after calibration"
        if self.multi_label:
            caption = f"Labels with their {self.settings.level} intervals"
            table = Table(caption, *multi_label.label_table(self))
            yield Section(f"Labels{state}", [table], folded=True)
            return
        bins = sorted(self.final.bins, key=lambda row: -row.contribution)
        cells = document.table_of_rows(bins[:_MOST_BINS], _BIN_COLUMNS)
        table = Table("Bins that add most to the ECE", *cells)
        title = f"Bins that add most to the calibration error{state}"
        yield Section(title, [table], folded=True)
        classes = sorted(self.final.classes, key=lambda row: -row.class_gap)
        if classes:
            shown = classes[:_MOST_CLASSES]
            caption = (
                f"{len(shown)} classes, those with the largest classwise ECE first"
            )
            cells = document.table_of_rows(shown, _CLASS_COLUMNS)
            yield Section(f"Classes{state}", [Table(caption, *cells)], folded=True)

    def figures(self) -> dict[str, Figure]:
        """Matplotlib figures by name, drawn when this is called; see `hf_calib.plots` for each."""
        if self.multi_label:
            return multi_label.draw_labels(self)
        found = _draw(self)
        for each in self.parts:
            found |= each.figures(self.settings.n_bins)
        return found

    def save(self, folder: Path | str) -> None:
        """Write `report.md`, `.html`, `.json` and `figures/*.png`, completely or not at all."""
        with whole_folder(Path(folder)) as made:
            self.document(with_figures=True).write(made, self.to_dict())

    def to_markdown(self) -> str:
        """The report as a Markdown document, without figures."""
        return self.document().to_markdown()

    def to_html(self) -> str:
        """The report as one HTML document, with styles and figures inside."""
        return self.document(with_figures=True).to_html()

    def _repr_html_(self) -> str:
        """The page for notebooks, in a frame, because its styles are for a separate page."""
        page = escape(self.to_html())
        style = "width: 100%; height: 40rem; border: 0"
        return f'<iframe srcdoc="{page}" style="{style}"></iframe>'


def _draw(report: CalibrationReport) -> dict[str, Figure]:
    """The figures by name of rows with one label each."""
    settings = report.settings
    rows: dict[str, Any] = {name: each.rows for name, each in report.panels.items()}
    bins = {name: each.bins("uniform") for name, each in rows.items()}
    n_rows = {name: len(each) for name, each in rows.items()}
    found = {"reliability": reliability_of_sums({"": bins}, n_rows=n_rows)}
    final: Any = report.final.rows
    if final.are_sorted:
        tops = {name: each.top for name, each in rows.items()}
        found["smooth_reliability"] = plots.smooth_reliability_diagram(
            tops, confidence_level=settings.confidence_level, seed=settings.seed
        )
        found["corp"] = plots.corp_diagram(tops, seed=settings.seed)
        found["confidence_histogram"] = plots.confidence_histogram(tops)
        found["risk_coverage"] = plots.risk_coverage_diagram(tops)
    else:
        curves = {name: _risk_curve(each) for name, each in rows.items()}
        found["risk_coverage"] = risk_coverage_of_curves(curves)
    if final.classes is not None:
        found["classwise"] = classes_of_sums(final.classes.bins, report.class_names)
    return found


def _risk_curve(rows: Rows) -> tuple[FloatArray, FloatArray]:
    """The coverages, and the error rates of the kept weights, most confident first."""
    counts, _, right = rows.by_confidence()[:, ::-1]
    kept = np.cumsum(counts)
    errors = np.cumsum(counts - right)
    # A row without weight before all others has no rate.
    used = np.flatnonzero(kept > 0)
    # More points than a figure shows would only make its file large.
    shown = used[some_points(len(used))]
    return kept[shown] / kept[-1], errors[shown] / kept[shown]
