"""The numbers of the result pages are those of the files beside them."""

from __future__ import annotations

from pathlib import Path

import check_tables
import pytest


@pytest.mark.parametrize(
    "check",
    [
        "training",
        "speed",
        "language_models",
        # Both make the tables of saved logits again, with their resamples.
        pytest.param("saved_logits", marks=pytest.mark.slow),
        pytest.param("statements", marks=pytest.mark.slow),
        "small_claims",
        pytest.param("post_hoc", marks=pytest.mark.slow),
        "linked",
    ],
)
def test_the_pages_agree_with_their_files(check: str) -> None:
    found = getattr(check_tables, check)()
    assert found.wrong == []
    assert found.agree > 50


def test_what_is_called_beyond_chance_has_its_corrected_p(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert check_tables.claims().wrong == []
    (tmp_path / "docs" / "losses").mkdir(parents=True)
    for name in ("README.md", "docs/losses/index.md", "docs/faq.md"):
        (tmp_path / name).write_text("No loss is better beyond chance.\n")
    monkeypatch.setattr(check_tables, "ROOT", tmp_path)
    monkeypatch.setattr(check_tables, "DOCS", tmp_path / "docs")
    (tmp_path / "docs" / "faq.md").write_text(
        "Focal is better beyond chance\n(corrected p 0.04). FCL is better beyond chance (p .02).\n"
        "MMCE is better beyond chance: corrected p 0.051.\n"
    )
    found = check_tables.claims()
    assert found.agree == 1
    said = "faq.md: a claim without its corrected p"
    assert found.wrong == [
        f"{said}: FCL is better beyond chance (p .02).",
        f"{said}: MMCE is better beyond chance: corrected p 0.051.",
    ]
