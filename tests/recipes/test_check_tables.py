"""The numbers of the result pages are those of the files beside them."""

from __future__ import annotations

import check_tables
import pytest


@pytest.mark.parametrize(
    "check",
    [
        "training",
        "saved_logits",
        "language_models",
        "statements",
        "small_claims",
        "post_hoc",
        "linked",
    ],
)
def test_the_pages_agree_with_their_files(check: str) -> None:
    found = getattr(check_tables, check)()
    assert found.wrong == []
    assert found.agree > 50
