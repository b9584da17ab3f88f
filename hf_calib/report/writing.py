"""Documents and reports as folders of files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_calib._files import whole_folder
from hf_calib.report.any_report import AnyReport
from hf_calib.report.document import Document


def write_document(document: Document, record: Mapping[str, Any], folder: Path, name: str = "report") -> None:
    """Write a document as .md and .html, its record as .json, and its figures, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(document.to_markdown(), encoding="utf-8")
    (folder / f"{name}.html").write_text(document.to_html(), encoding="utf-8")
    text = json.dumps(record, indent=2, allow_nan=False)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    for figure, image in document.images.items():
        (folder / "figures").mkdir(exist_ok=True)
        (folder / "figures" / f"{figure}.png").write_bytes(image.data)


def write_report(report: AnyReport, folder: Path) -> None:
    """Write report.md, report.html, report.json and the figures into a folder."""
    write_document(report.document(with_figures=True), report.to_dict(), folder)


def write_to(output: Path | None, report: AnyReport) -> None:
    """The same, whole or not at all; nothing for None."""
    if output is not None:
        with whole_folder(output) as folder:
            write_report(report, folder)
