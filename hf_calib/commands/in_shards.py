"""Commands on predictions that are not held at once: measured in one pass, in batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_calib.commands.opening import Running, may_be_large, name_of
from hf_calib.metrics import CalibrationState
from hf_calib.metrics.checks import check_rows
from hf_calib.metrics.state import SliceSums, score_chunks
from hf_calib.predictions.passes import Tally, Unfinished, measure_in_one_pass
from hf_calib.predictions.shard_formats import Piece
from hf_calib.predictions.shards import Shards, is_many, open_shards
from hf_calib.predictions.slicing import Slicing, choose_slicings
from hf_calib.report import report_on_predictions
from hf_calib.report.any_report import AnyReport
from hf_calib.report.measures import Settings
from hf_calib.report.one_pass import OnePassReport, report_on_states
from hf_calib.report.slices import slice_section

_UNFINISHED = "unfinished.npz"


@dataclass(frozen=True)
class Measuring:
    """Sums the rows of a piece, all of them and by slice.

    Args:
        n_bins: M.
        slicings: of the columns that name slices, in the order of a batch's.
    """

    n_bins: int
    slicings: tuple[Slicing, ...] = ()

    def __call__(self, shards: Shards, number: int, piece: Piece) -> Tally:
        n_classes = len(shards.class_names)
        state = CalibrationState(n_classes=n_classes, n_bins=self.n_bins)
        slices = {each.column: SliceSums(each.column, self.n_bins) for each in self.slicings}
        for first, batch in shards.batches(number, piece):
            with shards.naming(number, first):
                check_rows(batch.probs, batch.labels, batch.weights, n_classes)
                named = [
                    (codes, slicing.names(values))
                    for slicing, (codes, values) in zip(self.slicings, batch.by, strict=True)
                ]
                for part, scores in score_chunks(batch.probs, batch.labels, batch.weights):
                    state.add_scores(scores)
                    for sums, (codes, names) in zip(slices.values(), named, strict=True):
                        sums.add(scores, codes[part], names)
        return Tally({"before": state}, slices, state.n_rows)


def open_if_many(
    sources: Sequence[str], *, label_column: str, weight_column: str | None = None, by: Sequence[str] = ()
) -> Shards | None:
    """Predictions in several files, in one that may be large, with weights or slices; None for any other file.

    Raises:
        ValueError: as `open_shards`.
    """
    asked = weight_column is not None or bool(by) or len(sources) > 1
    if not asked and not is_many(sources[0]) and not may_be_large(sources[0]):
        return None
    return open_shards(sources, label_column=label_column, weight_column=weight_column, by=by)


def need_one_pass(shards: Shards) -> bool:
    """Whether rows have weights or slices, or are too many to be held."""
    return shards.columns.weight is not None or bool(shards.by) or not shards.fit_into_memory()


def report_on_shards(
    shards: Shards,
    *,
    n_bins: int,
    running: Running,
    output: Path | None = None,
    workers: int | None = None,
) -> AnyReport:
    """The report on predictions: on all rows where they can be held, else of one pass; see `evaluate_shards`."""
    if need_one_pass(shards):
        return evaluate_shards(shards, n_bins=n_bins, output=output, workers=workers, running=running)
    found = shards.load()
    running.stages(f"measuring {len(found):,} rows")
    return report_on_predictions(found, name_of(shards.name), n_bins)


def evaluate_shards(
    shards: Shards,
    *,
    n_bins: int,
    output: Path | None,
    workers: int | None,
    running: Running,
) -> OnePassReport:
    """The report of one pass over predictions; killed, the same call with an output goes on where it was."""
    if shards.by:
        running.stages(f"looking at {', '.join(shards.by)}")
    measuring = Measuring(n_bins, choose_slicings(shards))
    options = json.dumps([n_bins, shards.class_names, [vars(each) for each in measuring.slicings]])
    unfinished = None if output is None else Unfinished(output / _UNFINISHED, options)
    running.stages(f"measuring {len(shards.files):,} files")
    tally = measure_in_one_pass(
        shards, measuring, unfinished=unfinished, workers=workers, on_rows=running.rows
    )
    return report_of(tally, shards, n_bins=n_bins)


def report_of(tally: Tally, shards: Shards, *, n_bins: int) -> OnePassReport:
    """The report on what was summed."""
    settings = Settings(n_bins, 0.95, 1000, 0)
    return report_on_states(
        tally.states["before"],
        after=tally.states.get("after"),
        class_names=shards.class_names,
        name=name_of(shards.name),
        slices=tuple(slice_section(sums, settings) for sums in tally.slices.values()),
        n_files=len(shards.files),
    )


def remove_unfinished(output: Path | None) -> None:
    """Remove what a pass kept for going on, once its report is written."""
    if output is not None:
        (output / _UNFINISHED).unlink(missing_ok=True)
