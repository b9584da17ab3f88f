"""Texts from data that a terminal, a page or a file system would obey: they are shown, and not obeyed."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from rich.console import Console

from hf_calib._errors import check, expected, few, printable
from hf_calib._text import escape, safe
from hf_calib.report.document import (
    Bullets,
    Document,
    Figures,
    Lead,
    Section,
    Table,
    draw,
)

# Escape sequences (7 and 8 bits), a bell, marks and overrides of direction, separators of lines.
OBEYED = (
    "\x00\x07\x1b\x7f\x9b\u061c\u200b\u200e\u200f\u202a\u202e\u2066\u2069\u2028\u2029"
)
IMAGE = "<img src=x onerror=alert(1)>"
HOSTILE = f"a{OBEYED}[31mb\r\n## c :smile: [bold] {IMAGE}"


def document_of(text: str) -> Document:
    table = Table(text, [text, "n"], [[text, text]], title=text)
    blocks = [Lead(text), Bullets([text], label=text), table]
    return Document(text, [Lead(text, strong=True), Section(text, blocks)])


def on_a_screen(document: Document) -> str:
    screen = Console(file=io.StringIO(), width=100)
    document.show(screen)
    return screen.file.getvalue()  # type: ignore[attr-defined]


def obeyed_in(text: str) -> set[str]:
    return {letter for letter in text if not letter.isprintable()} - {"\n"}


@given(st.text(st.sampled_from(f"{OBEYED}ab <|`[]#\t\r\n\u00a0"), max_size=20))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_no_form_of_a_document_has_a_control_character(text: str) -> None:
    document = document_of(text)
    for form in (document.to_markdown(), document.to_html(), on_a_screen(document)):
        assert obeyed_in(form) == set()


def test_markup_and_the_names_of_pictures_are_text() -> None:
    document = document_of(HOSTILE)
    assert "<img" not in document.to_markdown()
    assert "<img" not in document.to_html()
    shown = on_a_screen(document)
    assert ":smile:" in shown
    assert "[bold]" in shown


@pytest.mark.parametrize(
    "name", ["a/b", "../../a", IMAGE, "\x1b]0;x\x07", "x" * 300, "क" * 300, "a\0b"]
)
def test_a_figure_of_any_name_is_a_file_in_its_folder(
    name: str, tmp_path: Path
) -> None:
    """A figure of slices is named after their column."""
    image = draw(Figure((1, 1)))
    names = [name, f"{name}?", f"{name}/"]
    figures = Figures(dict.fromkeys(names, image), dict.fromkeys(names, IMAGE))
    document = Document("x", [Section("Figures", [figures])])
    document.write(tmp_path / "out", {})
    files = [path.name for path in (tmp_path / "out" / "figures").iterdir()]
    assert len(files) == len(names)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    text = (tmp_path / "out" / "report.md").read_text()
    for file in files:
        assert f"](figures/{file})" in text
    assert "<img" not in text
    assert obeyed_in(text + (tmp_path / "out" / "report.html").read_text()) == set()


def test_messages_are_one_line_of_a_readable_length() -> None:
    long = f"{HOSTILE}{'x' * 100_000}"
    with pytest.raises(ValueError, match="expected a") as refused:
        check(False, f"a{long} to be b", long, long)
    said = [
        str(refused.value),
        expected(long, long, long, long),
        few([long, long]),
        escape(HOSTILE),
        safe(HOSTILE),
        printable(HOSTILE),
    ]
    for each in said:
        assert each.isprintable()
        assert len(each) < 3_500
