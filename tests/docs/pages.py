"""The code of a page: fenced blocks in their order, what they print, and which of them cannot run here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from markdown_it import MarkdownIt

from tests.helpers.places import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(
    path.relative_to(DOCS).as_posix()
    for path in DOCS.rglob("*.md")
    if not {"_build", "auto_gallery", "gallery"} & set(path.relative_to(DOCS).parts)
)
READMES = ["../README.md", "../recipes/README.md"]
# The second word of a fence that is not run: what it needs that this machine has not.
NOT_RUN = {"gpu", "server", "installing", "minutes", "sketch", "trl", "trainers"}


@dataclass
class Block:
    """A piece of code: "python", "bash", or a "file", which is written under its `name`; and what it prints."""

    kind: str
    code: str
    line: int
    printed: str | None = None
    name: str = ""

    def commands(self) -> list[str]:
        """The command lines of a bash block, each whole, without prompts and comments."""
        whole = self.code.replace("\\\n", " ")
        lines = [
            re.sub(r"\s+", " ", line.split("  #")[0]).strip()
            for line in whole.splitlines()
        ]
        return [line for line in lines if line and not line.startswith("#")]


def blocks(page: str, *, runs_too: str = "") -> list[Block]:
    """The blocks of a page of docs/ that run, and those that need something that is there."""
    found: list[Block] = []
    follows = False
    for token in MarkdownIt().parse(text_of_page(page)):
        if page in READMES:  # their commands are indented, and the rest is not run
            if token.type == "code_block" and token.content.startswith(
                ("hf-calib ", "python ")
            ):
                found.append(Block("bash", token.content, (token.map or [0])[0] + 1))
            continue
        if token.type != "fence":
            follows = follows and token.type in (
                "paragraph_open",
                "paragraph_close",
                "inline",
            )
            continue
        language, *rest = token.info.split()
        line = (token.map or [0])[0] + 1
        if token.info == "text" and follows and found[-1].printed is None:
            found[-1].printed = token.content
        follows = False
        if language in ("python", "bash") and rest in ([], [runs_too]):
            found.append(Block(language, token.content, line))
            follows = True
        elif language in ("python", "bash"):
            assert set(rest) <= NOT_RUN, f"{page}:{line}: {token.info}"
        elif language == "{code-block}" and ":caption:" in token.content:
            name = re.search(r"^:caption: (\S+)$", token.content, flags=re.MULTILINE)
            assert name is not None, f"{page}:{line}"
            code = re.sub(r"^:.*\n", "", token.content, flags=re.MULTILINE).lstrip("\n")
            found.append(Block("file", code, line, name=name[1]))
    return found


def text_of_page(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")
