"""Tables in the formats that files of predictions have."""

from __future__ import annotations

from pathlib import Path

import pandas


def write_table(table: pandas.DataFrame, path: Path) -> Path:
    """Write a table as csv, tsv, jsonl or parquet, by the ending of the path."""
    if path.suffix == ".parquet":
        table.to_parquet(path)
    elif path.suffix == ".jsonl":
        table.to_json(path, orient="records", lines=True)
    else:
        table.to_csv(path, index=False, sep="\t" if path.suffix == ".tsv" else ",")
    return path
