"""A study's report as files: Markdown, HTML, JSON, a tidy table and figures."""

from __future__ import annotations

import csv
from pathlib import Path

from hf_calib._files import move_files, whole_folder
from hf_calib.report.document import draw
from hf_calib.report.writing import write_document
from hf_calib.study.content import document_of
from hf_calib.study.figures import CAPTIONS, draw_figures
from hf_calib.study.results import StudyResults


def write_study_report(results: StudyResults, folder: Path) -> None:
    """Write report.md, report.html, report.json, results.csv and figures/*.png into a study's folder.

    results.csv has a row for each number of each training: loss, seed, method, metric, value; the value of a
    metric that is undefined is empty.

    Args:
        results: from `measure_study`.
        folder: a new one, or one that exists. An earlier report in it is replaced, with the figures that this
            one lacks; all other files stay.

    Raises:
        OSError: if it cannot be written; what was there stays.
        ValueError: if a folder is in a file's place, or the other way round; nothing is written then.
    """
    images = {name: draw(figure) for name, figure in draw_figures(results).items()}
    record = results.to_dict()
    with whole_folder(folder, merge=_replace_report) as made:
        write_document(document_of(results, images), record, made)
        with (made / "results.csv").open("w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, ["loss", "seed", "method", "metric", "value"])
            table.writeheader()
            table.writerows(record["values"])


def _replace_report(made: Path, folder: Path) -> None:
    """Move a report's files over those of an earlier one, whose other figures go."""
    stale = [folder / "figures" / f"{name}.png" for name in CAPTIONS]
    stale = [path for path in stale if not (made / path.relative_to(folder)).exists()]
    move_files(made, folder)
    for path in stale:
        path.unlink(missing_ok=True)
