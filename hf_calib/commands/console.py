"""Results of commands that write no report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Done:
    """The result of a command without a report: lines, lists of lines to copy, a record for JSON,
    and warnings.
    """

    lines: Sequence[str | list[str]]
    record: Mapping[str, Any]
    notes: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """The record with the warnings."""
        return {**self.record, "notes": list(self.notes)}
