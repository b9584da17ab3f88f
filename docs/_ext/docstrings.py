"""Docstrings as autodoc reads them: formulas, `$...$` and `$$...$$`, and plain text, in reStructuredText."""

from __future__ import annotations

import re
from textwrap import indent
from typing import Any

from sphinx.application import Sphinx
from transformers import TrainingArguments

_BLOCK = re.compile(r"^([ \t]*)\$\$(.+?)\$\$", flags=re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"(?<![$\\])\$([^$\n]+(?:\n[^$\n]+)?)\$(?!\$)")
_ALIAS = re.compile(r"TypeAliasForwardRef\('(\w+)'\)")
_RANGE = re.compile(r"Annotated\[([^,]+?), ~.*?\)\]")
# Code, formulas, doctests and entries of sections are left as they are; elsewhere names_ and |bars| would be markup.
_CODE_OR_TEXT = re.compile(
    r"(``?[^`]+``?|^[ \t]*(?:>>>|\.\.\.).*$|^[ \t]*\.\. math::\n\n.*$|^[ \t]+\w+_(?=:))|(\w_(?!\w)|\|)",
    flags=re.MULTILINE,
)


def with_formulas(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Replace the lines of a docstring by those that Sphinx reads."""
    text = _BLOCK.sub(_block, "\n".join(lines))
    text = _INLINE.sub(lambda found: f":math:`{' '.join(found[1].split())}`", text)
    lines[:] = _CODE_OR_TEXT.sub(_escaped, text).split("\n")


def _block(found: re.Match[str]) -> str:
    margin, formula = found.groups()
    return (
        f"{margin}.. math::\n\n"
        + indent(" ".join(formula.split()), margin + "    ")
        + "\n"
    )


def _escaped(found: re.Match[str]) -> str:
    return found[1] or found[2].replace("_", r"\_").replace("|", r"\|")


def without_ranges(
    app: Sphinx,
    what: str,
    name: str,
    obj: Any,
    options: Any,
    signature: str | None,
    returned: str | None,
) -> tuple[str | None, str | None]:
    """Show the type of a hyperparameter, not the object that checks its range, which its docstring states."""
    if isinstance(obj, type) and issubclass(obj, TrainingArguments):
        return "(output_dir: str | None = None, **arguments)", returned  # there are 120
    return _ALIAS.sub(
        r"\1", _RANGE.sub(r"\1", signature)
    ) if signature else signature, returned


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect to autodoc, before napoleon does; called by Sphinx."""
    app.connect("autodoc-process-signature", without_ranges)
    app.connect("autodoc-process-docstring", with_formulas, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
