"""A report as one HTML file: styles inside, figures as embedded images, no script, nothing to load."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from hf_calib.plots._common import write_image
from hf_calib.report.figures import CAPTIONS, alt_texts
from hf_calib.report.text import bin_table, class_table, final_state, footnotes, metric_table, summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hf_calib.report._report import CalibrationReport
    from hf_calib.report.decisions import DecisionSection

_DPI = 180
# The colours follow the reader's light or dark mode; figures keep their white ground in both, and on paper.
_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1a1a1a; --faint: #666; --line: #d5d5d5; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #16181b; --ink: #e6e6e6; --faint: #a3a3a3; --line: #3a3d42; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 62rem; background: var(--ground);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.6rem; overflow-wrap: anywhere; }
h2 { margin: 2.2rem 0 .6rem; font-size: 1.15rem; }
p.summary, ul.notes, figcaption { color: var(--faint); font-size: .875rem; }
ul { padding-left: 1.2rem; }
li { margin: .3rem 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
.scroll:focus-visible { outline: 2px solid var(--faint); outline-offset: 2px; }
caption { padding-bottom: .4rem; color: var(--faint); text-align: left; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
thead th { border-bottom-width: 2px; }
th[scope="row"] { font-weight: normal; }
th:first-child, td:first-child { padding-left: 0; text-align: left; white-space: normal;
  min-width: 9rem; overflow-wrap: anywhere; }
.figures { display: flex; flex-wrap: wrap; gap: 1.25rem; align-items: flex-start; }
figure { margin: 0; max-width: 100%; }
figure img { display: block; max-width: 100%; height: auto; padding: .5rem; background: #fff;
  border-radius: 4px; border: 1px solid var(--line); }
figcaption { margin-top: .35rem; max-width: 34rem; }
@media print {
  :root { --ground: #fff; --ink: #000; --faint: #444; --line: #bbb; }
  body { padding: 0; max-width: none; font-size: 10pt; }
  h2 { break-after: avoid; }
  .figures { display: block; }
  figure { margin-bottom: 6mm; }
  figure, tr { break-inside: avoid; }
  thead { display: table-header-group; }
  .scroll { overflow: visible; }
  table { font-size: 8.5pt; }
  th, td { padding: .15rem .45rem; }
  thead th { white-space: normal; }
}
"""


def to_html(report: CalibrationReport) -> str:
    """What `CalibrationReport.to_html` returns."""
    title = escape(f"Calibration of {report.name}")
    state = final_state(report)
    level = f"{100 * report.confidence_level:g}%"
    bins = _table("Bins, those that add most to the ECE first", *bin_table(report))
    classes = _table("Classes, those with the largest class gap first", *class_table(report))
    parts = [
        f"<h1>{title}</h1>",
        f'<p class="summary">{escape(summary(report))}</p>',
        _section("Diagnosis", _bullets(report.diagnosis)),
        _section("Caveats", _bullets(report.warnings)) if report.warnings else "",
        _decisions(report.decisions) if report.decisions is not None else "",
        _section(
            "Metrics",
            _table(f"Metrics with their {level} bootstrap intervals", *metric_table(report)),
            _bullets(footnotes(report), "notes"),
        ),
        _section("Figures", _figures(report.figures(), alt_texts(report))),
        _section(f"Bins that add most to the calibration error{state}", bins),
        _section(f"Classes{state}", classes),
    ]
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def _decisions(section: DecisionSection) -> str:
    table = _table("What the rule does, with 95% intervals", *section.table())
    return _section("Decisions", table, _bullets(section.sentences(), "notes"))


def _section(title: str, *parts: str) -> str:
    return "\n".join([f"<section>\n<h2>{escape(title)}</h2>", *parts, "</section>"])


def _bullets(sentences: Iterable[str], style: str = "") -> str:
    items = "\n".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<ul class="{style}">\n{items}\n</ul>' if style else f"<ul>\n{items}\n</ul>"


def _table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls sideways where the page is narrow, with the keyboard too."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = "\n".join(map(_row, rows))
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"><table>\n'
        f"<caption>{escape(caption)}</caption>\n"
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _row(cells: Sequence[str]) -> str:
    name, *values = map(escape, cells)
    return f'<tr><th scope="row">{name}</th>{"".join(f"<td>{value}</td>" for value in values)}</tr>'


def _figures(figures: dict[str, Figure], alt_texts: dict[str, str]) -> str:
    shown = [_figure(figure, CAPTIONS[name], alt_texts[name]) for name, figure in figures.items()]
    return f'<div class="figures">\n{chr(10).join(shown)}\n</div>'


def _figure(figure: Figure, caption: str, alt: str) -> str:
    """PNG, which is the same on every run; its width in CSS pixels is that of the figure on paper."""
    stream = io.BytesIO()
    write_image(figure, stream, format="png", dpi=_DPI)
    data = base64.b64encode(stream.getvalue()).decode("ascii")
    width = round(figure.get_figwidth() * 96)
    return (
        f'<figure><img style="width: {width}px" alt="{escape(alt)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )
