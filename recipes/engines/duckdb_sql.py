"""ECE, NLL and Brier score of predictions by SQL: python recipes/engines/duckdb_sql.py 'FOLDER/*.parquet' N_CLASSES

These metrics are sums by bin, so that the query runs in any database with these functions, without
Python. Bins are (lower, upper] as everywhere here; a confidence within rounding of an edge k/M may
fall on its other side.
"""

import json
import sys

import duckdb


def query(files: str, n_classes: int, n_bins: int = 15) -> str:
    classes = range(n_classes)
    probs = [f"prob_{c}::double" for c in classes]
    listed = ", ".join(probs)
    largest = f"greatest({listed})"
    squares = " + ".join(f"{p} * {p}" for p in probs)
    p_of_label = " ".join(f"when {c} then {probs[c]}" for c in classes)
    predicted = " ".join(f"when {probs[c]} = {largest} then {c}" for c in classes)
    path = files.replace("'", "''")
    return f"""
    with rows as (
      select {largest} as confidence, (case {predicted} end = label)::int as is_right,
        case label {p_of_label} end as p, {squares} as squares
      from read_parquet('{path}')
    ), bins as (
      select count(*) as n, sum(confidence) as confidence, sum(is_right) as n_right,
        sum(-ln(greatest(p, {sys.float_info.min}))) as nll, sum(squares - 2 * p + 1) as brier
      from rows group by greatest(ceil(confidence * {n_bins}), 1)
    )
    select sum(n_right) / sum(n) as accuracy, sum(nll) / sum(n) as nll, sum(brier) / sum(n) as brier,
      sum(abs(confidence - n_right)) / sum(n) as ece from bins"""


def evaluate(files: str, n_classes: int) -> dict[str, float]:
    found = duckdb.sql(query(files, n_classes))
    return dict(zip(found.columns, found.fetchall()[0], strict=True))


if __name__ == "__main__":
    print(json.dumps(evaluate(sys.argv[1], int(sys.argv[2]))))
