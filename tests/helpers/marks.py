"""Which of many like cases run at each change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def others_slow(cases: Iterable[Any], *, first: int) -> Sequence[Any]:
    """Parameters of which `make test` takes the first, and `make test-slow` the others."""
    cases = list(cases)
    rest = [case if isinstance(case, tuple) else (case,) for case in cases[first:]]
    return [*cases[:first], *(pytest.param(*case, marks=pytest.mark.slow) for case in rest)]
