"""The calibration report of one model on one labelled dataset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_calib._files import whole_folder
from hf_calib.plots import roc_diagram
from hf_calib.report import multi_label
from hf_calib.report.diagnosis import claims, diagnose, warn
from hf_calib.report.document import Block, Bullets, Document, Figures, Lead, Section, Table, draw
from hf_calib.report.figures import draw_rows, draw_states
from hf_calib.report.measured import MAX_EXAMPLES_FOR_KDE, MEASURES, Measured, Settings
from hf_calib.report.rows import Cells, columns, p_cell, plain, table_of, table_of_fields, worst_bins
from hf_calib.report.sections import (
    DecisionSection,
    EntitySection,
    OodSection,
    ReportSection,
    SoftLabelSection,
)
from hf_calib.report.slices import SliceSection

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MULTI_LABEL = "multi_label"  # kinds of a record
ONE_PASS = "one_pass"
_MOST_CLASSES = 30  # in the table
_CAPTIONS = {
    "reliability": "Reliability in bins: accuracy against confidence, and the share of examples in each bin.",
    "smooth_reliability": "Reliability without bins: smoothed accuracy, thick where confidences are frequent, "
    "with a bootstrap band.",
    "corp": "Reliability by isotonic regression (CORP): the recalibrated confidence, and a pointwise band, which the "
    "curve of a calibrated model, too, leaves somewhere in most diagrams.",
    "confidence_histogram": "Confidences of right predictions (up) and of wrong ones (down).",
    "risk_coverage": "Error rate among the most confident predictions, against the share of them that is kept.",
    "decisions": "Share of inputs answered for a promised accuracy (left), and the accuracy of the answers with 95% "
    "intervals (right).",
    "entities": "Reliability of predicted entities, by the product and by the smallest of their tokens' probabilities.",
    "out_of_distribution": "Inputs from elsewhere that are flagged, against familiar ones that are, for every "
    "threshold.",
    "classwise": "How often a class is true against its probability, in bins with 95% Wilson intervals.",
}
_BIN_COLUMNS = {
    "confidence": ("range", ""),
    "examples": ("count", ","),
    "mean confidence": ("confidence", ".3f"),
    "accuracy": ("accuracy", ".3f"),
    "gap": ("gap", "+.3f"),
    "part of ECE": ("contribution", ".4f"),
    "p": ("p_in_table", ""),
}
_CLASS_COLUMNS = {
    "class": ("name", ""),
    "examples": ("support", ","),
    "frequency": ("frequency", ".4f"),
    "mean probability": ("mean_probability", ".4f"),
    "class gap": ("class_gap", ".4f"),
    "predicted": ("predicted", ","),
    "precision": ("precision", ".3f"),
    "confidence": ("confidence", ".3f"),
}
_GAP = (
    "A gap is confidence minus accuracy: above 0 is over-confident. p is the chance of a gap at least as large "
    "if the confidences were right."
)


@dataclass(frozen=True, kw_only=True)
class CalibrationReport:
    """Metrics with intervals, tables, figures and a diagnosis in words.

    Made by `calibration_report`, or by `report_on_states` of rows that were not held: a report then has the metrics
    that sums tell.

    Args:
        name: the model's.
        class_names: C of them.
        before: the probabilities as the model gives them.
        after: the calibrated ones, or None.
        settings: of every number; a slow metric has fewer resamples, which its `Measured` says.
        labels: (N,) int; or (N, C) of 1, 0 and -100 for several labels a row; None of sums.
        notes: sentences on the data that whoever made the report adds to the warnings.
        about: which rows these are and which weights gave the probabilities, for readers of report.json: text and
            numbers, see `hf_calib.cards.facts`.
        n_files: that the rows of one pass are from, or None.
        decisions: what a rule does on these examples, or None.
        entities: of tokens whose tags are B-TYPE, I-TYPE and O: their entities, measured; or None.
        out_of_distribution: OOD detection against these examples; one for each dataset.
        soft_labels: the probabilities against soft labels of the same examples, or None.
        slices: of the final probabilities, a section for each column.
    """

    name: str
    class_names: tuple[str, ...]
    before: Measured
    after: Measured | None = None
    settings: Settings
    labels: Any = field(default=None, repr=False, compare=False)
    notes: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    n_files: int | None = None
    decisions: DecisionSection | None = None
    entities: EntitySection | None = None
    out_of_distribution: tuple[OodSection, ...] = ()
    soft_labels: SoftLabelSection | None = None
    slices: tuple[SliceSection, ...] = ()

    @property
    def n_bins(self) -> int:
        """M."""
        return self.settings.n_bins

    @property
    def confidence_level(self) -> float:
        """Of every interval."""
        return self.settings.confidence_level

    @property
    def n_examples(self) -> int:
        """N."""
        return self.before.overall.n_examples if self.labels is None else len(self.labels)

    @property
    def n_classes(self) -> int:
        """C."""
        return len(self.class_names)

    @property
    def multi_label(self) -> bool:
        """Whether a row has several labels, each with a probability of its own."""
        return self.labels is not None and self.labels.ndim == 2

    @property
    def n_decisions(self) -> int:
        """Labels that are known, over all rows; N where a row has one class."""
        return sum(row.count for row in self.before.bins)

    @property
    def final(self) -> Measured:
        """After calibration, where there is that."""
        return self.after or self.before

    @property
    def states(self) -> dict[str, Measured]:
        """Both, by the names of their columns."""
        return columns(self.before, self.after)

    @property
    def panels(self) -> dict[str, Measured]:
        """The same by their names in figures."""
        if self.after is None:
            return {self.name: self.before}
        return {"before": self.before, "after calibration": self.after}

    @property
    def sections(self) -> list[ReportSection]:
        """What not every report has."""
        single = (self.decisions, self.entities, *self.out_of_distribution, self.soft_labels, *self.slices)
        return [each for each in single if each is not None]

    @property
    def diagnosis(self) -> tuple[str, ...]:
        """Sentences: over- or under-confident, where, whether chance can explain it, and which slices differ."""
        found = multi_label.diagnose_labels(self) if self.multi_label else diagnose(self)
        return (*found, *(each.finding for each in self.slices))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences: the caveats, what makes the numbers uncertain."""
        return (*self.notes, *(multi_label.warn_of_labels(self) if self.multi_label else warn(self)))

    @property
    def _titles(self) -> Mapping[str, str]:
        if self.multi_label:
            return multi_label.titles_of(self)
        return {key: measure.title for key, measure in MEASURES.items()}

    def to_dict(self) -> dict[str, Any]:
        """Everything but figures and arrays, of JSON's own types; None where there is no number."""
        kind: dict[str, Any] = (
            {"kind": MULTI_LABEL, "n_decisions": self.n_decisions} if self.multi_label else {}
        )
        state = self.before.state
        if state is not None:
            medians = [each.state.confidence_quantile(0.5) for each in self.states.values() if each.state]
            kind = {"kind": ONE_PASS, "n_files": self.n_files, "weighted": state.weighted}
            kind |= {"effective_rows": state.top_label.effective_rows()[0], "median_confidence": medians}
        names = ("decisions", "out_of_distribution", "soft_labels", "entities", "slices")
        found: dict[str, Any] = {name: getattr(self, name) for name in names}
        sections = {
            name: [part.to_dict() for part in each] if isinstance(each, tuple) else each and each.to_dict()
            for name, each in found.items()
        }
        record = {
            **kind,
            "name": self.name,
            "n_examples": self.n_examples,
            "n_classes": self.n_classes,
            **self.settings._asdict(),
            "before": self._record(self.before),
            "after": None if self.after is None else self._record(self.after),
            "diagnosis": self.diagnosis,
            "warnings": self.warnings,
            **sections,
            "about": self.about,
        }
        return dict(plain(record))

    def _record(self, measured: Measured) -> dict[str, Any]:
        titles = multi_label.TITLES if self.multi_label else self._titles
        metrics = {
            key: {"title": titles[key], **found._asdict(), "n_resamples": measured.n_resamples[key]}
            for key, found in measured.metrics.items()
        }
        record: dict[str, Any] = {"metrics": metrics, "bins": measured.bins}
        if self.multi_label:
            titles = {"prevalence": "Prevalence", **multi_label.LABEL_MEASURES}
            labels = [
                {
                    **plain(label),
                    "metrics": {
                        key: {"title": titles[key], **v._asdict()} for key, v in label.metrics.items()
                    },
                }
                for label in measured.labels
            ]
            return record | {"gap": measured.gap, "labels": labels}
        return record | {
            "overall": {**measured.overall._asdict(), "verdict": claims(self, measured).verdict},
            "consistency_test": measured.consistency,
            "worst_bins": worst_bins(measured.bins),
            "classes": measured.classes,
        }

    def summary(self) -> str:
        """One line on what was measured."""
        words = [str(self.about[key]) for key in ("name", "split", "part") if self.about.get(key)]
        of, state, (n_bins, _, n_resamples, seed) = ", ".join(words), self.before.state, self.settings
        counts = [f"{self.n_examples:,} examples"]
        if self.n_files is not None:
            counts[0] += f" in {self.n_files:,} file{'s' * (self.n_files != 1)}"
        if state is not None and state.weighted:
            effective = float(state.top_label.effective_rows()[0])
            counts.append(f"weighted: they tell as much as {effective:,.0f} without weights")
        counts.append(f"{self.n_classes:,} {'labels' if self.multi_label else 'classes'}")
        counts += [f"{self.n_decisions:,} decisions"] if self.multi_label else []
        drawn = f" from {n_resamples:,} resamples" if state is None else ""
        end = "" if state is None else " From sums, in one pass."
        return (
            f"{of and f'{of}: '}{', '.join(counts)}, {n_bins} bins; intervals of {self.settings.level}{drawn}, "
            f"seed {seed}.{end}"
        )

    def metric_table(self) -> Cells:
        """Every metric, with its interval, before and after."""
        header, rows = table_of(
            "metric", self._titles, {name: state.metrics for name, state in self.states.items()}
        )
        tests = [each.consistency for each in self.states.values() if each.consistency is not None]
        if tests:
            rows.append(["Consistency test of the ECE (p)", *(p_cell(test.p_value) for test in tests)])
        return header, rows

    def footnotes(self) -> list[str]:
        """How to read the tables, and what they leave out."""
        if self.multi_label:
            return list(multi_label.FOOTNOTES)
        before, state = self.before, self.before.state
        others = "All else: bootstrap intervals." if state is None else "All else: normal intervals."
        notes = [
            "Noise makes every calibration error larger, the more so the fewer examples. The interval of an ECE is of "
            "the error without it, in the same bins (by test inversion): a plain ECE may lie above its own. The other "
            f"errors have no interval, as a resample would add the noise again. {others}",
            _GAP,
        ]
        if state is None:
            notes += self._fewer_resamples()
        else:
            medians = [each.state.confidence_quantile(0.5) for each in self.states.values() if each.state]
            notes.append(
                "Sums of all rows are exact. The adaptive ECE, the area under the risk-coverage curve and the median "
                "confidence are from cells: confidences are counted in 98,304 cells, and those of one cell are not "
                f"told apart. Median confidence: {' and '.join(f'{median:.4f}' for median in medians)}."
            )
        missing = [measure.title for key, measure in MEASURES.items() if key not in before.metrics]
        if state is not None:
            why = "have no weighted form" if state.weighted else "need the rows at once"
            notes.append(f"Not here, as they {why}: {'; '.join(missing)}.")
        elif "kde_ece" not in before.metrics:
            notes.append(f"The kernel ECE is computed for 2 to {MAX_EXAMPLES_FOR_KDE:,} examples only.")
        if state is not None and state.weighted:
            notes.append(
                "With weights, intervals and tests are for (sum of weights)^2 / (sum of squared weights) rows (Kish "
                "1965). Examples of a bin are rows; those of a class are weights, scaled to the number of rows."
            )
        if self.n_classes > _MOST_CLASSES:
            notes.append(
                f"Of {self.n_classes:,} classes, the {_MOST_CLASSES} with the largest class gap are in the table."
            )
        return notes

    def _fewer_resamples(self) -> list[str]:
        """Which metrics have fewer resamples than asked for, because they are slow, or no interval at all."""
        slow: dict[int, list[str]] = {}
        for key, n_resamples in self.before.n_resamples.items():
            if n_resamples < self.settings.n_resamples and MEASURES[key].interval != "none":
                slow.setdefault(n_resamples, []).append(MEASURES[key].title)
        return [
            f"{f'Intervals from {count:,} resamples' if count else 'No interval'}, because resampling is slow: "
            f"{'; '.join(titles)}."
            for count, titles in slow.items()
        ]

    def document(self, *, with_figures: bool = False) -> Document:
        """The report as blocks, for any form; figures take longer to draw than all else."""
        title, level = f"Calibration report: {self.name}", self.settings.level
        blocks: list[Block] = [Lead(self.summary()), Section("Diagnosis", [Bullets(self.diagnosis)])]
        if self.warnings:
            blocks.append(Section("Caveats", [Bullets(self.warnings, label="Note: ")]))
        if with_figures:
            images = {name: draw(figure) for name, figure in self.figures().items()}
            captions = _CAPTIONS | (multi_label.CAPTIONS if self.multi_label else {})
            for column in (each.column for each in self.slices):
                captions[f"slices_{column}"] = (
                    f"Confidence minus accuracy by {column}, with {level} intervals."
                )
            blocks.append(Section("Figures", [Figures(images, captions)]))
        metrics = Table(f"Metrics with their {level} intervals", *self.metric_table(), title=title)
        blocks.append(Section("Metrics", [metrics, Bullets(self.footnotes(), faint=True)]))
        blocks += [each.block(level) for each in self.sections]
        state = "" if self.after is None else ", after calibration"
        if self.multi_label:
            labels = Table(f"Labels with their {level} intervals", *multi_label.label_table(self))
            blocks.append(Section(f"Labels{state}", [labels]))
        else:
            rows = sorted(self.final.classes, key=lambda row: (-row.class_gap, row.index))[:_MOST_CLASSES]
            worst = table_of_fields(worst_bins(self.final.bins), _BIN_COLUMNS)
            bins = Table("Bins, those that add most to the ECE first", *worst)
            largest = "Classes, those with the largest class gap first"
            classes = Table(largest, *table_of_fields(rows, _CLASS_COLUMNS))
            blocks.append(Section(f"Bins that add most to the calibration error{state}", [bins]))
            blocks.append(Section(f"Classes{state}", [classes]))
        written = datetime.now(timezone.utc).date().isoformat()
        blocks.append(Bullets([f"Written on {written} by hf_calib {version('hf_calib')}."], faint=True))
        return Document(title, blocks)

    def figures(self) -> dict[str, Figure]:
        """Matplotlib figures by name, drawn when this is called; see `hf_calib.plots` for each."""
        if self.multi_label:
            return multi_label.draw_labels(self)
        found = draw_rows(self) if self.before.state is None else draw_states(self)
        for each in self.sections:
            found |= each.figures(self.n_bins)
        if self.out_of_distribution:
            found["out_of_distribution"] = roc_diagram(
                {each.name: each.curves() for each in self.out_of_distribution}
            )
        return found

    def save(self, folder: Path | str) -> None:
        """Write report.md, report.html, report.json and figures/*.png into a folder, whole or not at all."""
        with whole_folder(Path(folder)) as made:
            self.write(made)

    def write(self, folder: Path) -> None:
        """The same into a folder of which the caller takes care."""
        self.document(with_figures=True).write(folder, self.to_dict())

    def to_markdown(self) -> str:
        """The report as a Markdown document, without figures."""
        return self.document().to_markdown()

    def to_html(self) -> str:
        """The report as one HTML document that needs no other file: styles and figures are inside."""
        return self.document(with_figures=True).to_html()

    def _repr_html_(self) -> str:
        """The page, for notebooks; in a frame, as its styles are for a page of its own."""
        return f'<iframe srcdoc="{escape(self.to_html())}" style="width: 100%; height: 40rem; border: 0"></iframe>'
