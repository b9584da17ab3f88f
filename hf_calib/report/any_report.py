"""What every report on one model and one dataset has, whether its rows were held or read in one pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from hf_calib.report.assessment import Measurements

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hf_calib.report.document import Block, Document
    from hf_calib.report.slices import SliceSection


@dataclass(frozen=True, kw_only=True)
class AnyReport(ABC):
    """Metrics with intervals, tables, figures and a diagnosis in words.

    Args:
        name: the model's.
        class_names: C of them.
        before: the probabilities as the model gives them.
        after: the calibrated ones, or None.
        n_bins: M.
        confidence_level: of every interval.
        n_resamples: of the bootstrap; a slow metric has fewer, which its `Measurements` say.
        seed: of the bootstrap.
        notes: sentences on the data that whoever made the report adds to the warnings.
        about: which rows these are and which weights gave the probabilities, for readers of report.json: text and
            numbers, see `hf_calib.cards.facts`.
        slices: of the final probabilities, a section for each column.
    """

    name: str
    class_names: tuple[str, ...]
    before: Measurements
    after: Measurements | None
    n_bins: int
    confidence_level: float
    n_resamples: int
    seed: int
    notes: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    slices: tuple[SliceSection, ...] = ()

    @property
    @abstractmethod
    def n_examples(self) -> int:
        """N."""

    @property
    def n_classes(self) -> int:
        """C."""
        return len(self.class_names)

    @property
    def final(self) -> Measurements:
        """After calibration, where there is that."""
        return self.after or self.before

    @property
    @abstractmethod
    def diagnosis(self) -> tuple[str, ...]:
        """Sentences: over- or under-confident, where, and whether chance can explain it."""

    @property
    @abstractmethod
    def warnings(self) -> tuple[str, ...]:
        """Sentences: the caveats, what makes the numbers uncertain."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Everything but figures and arrays, of JSON's own types; None where there is no number."""

    def document(self, *, with_figures: bool = False) -> Document:
        """The report as blocks, for any form; figures take longer to draw than all else."""
        from hf_calib.report.content import document_of

        return document_of(self, with_figures=with_figures)

    @abstractmethod
    def summary(self) -> str:
        """One line: how many examples, classes and bins."""

    @abstractmethod
    def metric_table(self) -> tuple[list[str], list[list[str]]]:
        """A header, and a row for each metric."""

    @abstractmethod
    def footnotes(self) -> list[str]:
        """How to read the metrics."""

    @abstractmethod
    def captions(self) -> dict[str, str]:
        """The caption of each figure."""

    @abstractmethod
    def alt_texts(self) -> dict[str, str]:
        """Each figure in numbers, for readers who cannot see it."""

    def sections(self, level: str) -> list[Block]:
        """Those before the metrics."""
        return []

    def sections_after_the_metrics(self, level: str) -> list[Block]:
        """Those beside them."""
        return []

    @abstractmethod
    def figures(self) -> dict[str, Figure]:
        """Matplotlib figures by name, drawn when this is called; see `hf_calib.plots` for each."""

    def to_markdown(self) -> str:
        """The report as a Markdown document, without figures."""
        return self.document().to_markdown()

    def to_html(self) -> str:
        """The report as one HTML document that needs no other file: styles and figures are inside."""
        return self.document(with_figures=True).to_html()

    def _repr_html_(self) -> str:
        """The page, for notebooks; in a frame, as its styles are for a page of its own."""
        return f'<iframe srcdoc="{escape(self.to_html())}" style="width: 100%; height: 40rem; border: 0"></iframe>'
