"""One HTML page that needs nothing else: styles inside, figures as embedded images, no script, nothing to load."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

# The colours follow the reader's light or dark mode; figures keep their white ground in both, and on paper.
_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1a1a1a; --faint: #666; --line: #d5d5d5; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #16181b; --ink: #e6e6e6; --faint: #a3a3a3; --line: #3a3d42; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 80rem; background: var(--ground);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.6rem; overflow-wrap: anywhere; }
h2 { margin: 2.2rem 0 .6rem; font-size: 1.15rem; }
p.summary, ul.notes, figcaption { color: var(--faint); font-size: .875rem; }
p, ul { max-width: 66rem; }
ul { padding-left: 1.2rem; }
li { margin: .3rem 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; --shade: color-mix(in srgb, var(--ink) 35%, transparent);
  background: linear-gradient(to left, var(--ground) 40%, transparent) right / 3rem 100% no-repeat local,
    linear-gradient(to left, var(--shade), transparent) right / .75rem 100% no-repeat scroll; }
.scroll:focus-visible { outline: 2px solid var(--faint); outline-offset: 2px; }
caption { padding-bottom: .4rem; color: var(--faint); text-align: left; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: pre; }
thead th { border-bottom-width: 2px; white-space: normal; vertical-align: bottom; }
th[scope="row"] { font-weight: normal; }
th:first-child, td:first-child { padding-left: 0; text-align: left; white-space: normal;
  min-width: 11.5rem; overflow-wrap: anywhere; position: sticky; left: 0; background: var(--ground); }
@media (max-width: 40rem) {
  th, td { padding: .3rem .35rem; white-space: normal; }
  th:first-child, td:first-child { min-width: 6.5rem; }
}
.figures { display: flex; flex-wrap: wrap; gap: 1.25rem; align-items: flex-start; }
details { margin: .4rem 0 1.4rem; }
details summary { cursor: pointer; color: var(--faint); font-size: .875rem; }
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
  th:first-child, td:first-child { position: static; }
  .scroll { overflow: visible; background: none; }
  table { font-size: 8.5pt; }
  th, td { padding: .15rem .45rem; }
}
"""


def page(title: str, parts: Iterable[str]) -> str:
    """A whole page of parts that are HTML already; empty ones are left out."""
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join([f"<h1>{escape(title)}</h1>", *filter(None, parts)])
        + "\n</main>\n</body>\n</html>\n"
    )
