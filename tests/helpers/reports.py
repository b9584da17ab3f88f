"""Quick reports, for tests that do not look at intervals or figures: these are tested with the reports themselves."""

from __future__ import annotations

import re
from functools import partial
from html import unescape

import pytest
from matplotlib.figure import Figure

from hf_calib.metrics import ood_detection
from hf_calib.report import CalibrationReport, calibration_report

PNG = b"\x89PNG\r\n\x1a\n"


def few_resamples(patch: pytest.MonkeyPatch, n_resamples: int = 20) -> None:
    """Reports on predictions, of commands and trainings, take so many resamples."""
    for place, slow in (
        ("hf_calib.report.making.calibration_report", calibration_report),
        ("hf_calib.report.sections.ood_detection", ood_detection),
    ):
        patch.setattr(place, partial(slow, n_resamples=n_resamples))


def no_figures(patch: pytest.MonkeyPatch) -> None:
    """Reports have one empty figure, no document's figures are drawn, and there is no page."""
    patch.setattr(
        CalibrationReport, "figures", lambda self: {"reliability": Figure((1, 1))}
    )
    patch.setattr(
        "hf_calib.report.document.write_image",
        lambda figure, stream, **_: stream.write(PNG),
    )
    patch.setattr(
        "hf_calib.report.document.Document.to_html", lambda self: "<!DOCTYPE html>"
    )


@pytest.fixture
def quick_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few resamples and no figures."""
    few_resamples(monkeypatch)
    no_figures(monkeypatch)


@pytest.fixture(autouse=True)
def quick_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for every test of a module that imports this."""
    few_resamples(monkeypatch)
    no_figures(monkeypatch)


def cells(table: str) -> list[list[str]]:
    """The text of a HTML table's cells, row by row."""
    rows = re.findall(r"<tr>(.*?)</tr>", table, flags=re.DOTALL)
    found = [
        re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, flags=re.DOTALL) for row in rows
    ]
    return [[unescape(cell) for cell in row] for row in found]
