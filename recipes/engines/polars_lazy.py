"""ECE, NLL and Brier score of predictions with Polars: python recipes/engines/polars_lazy.py FOLDER N_CLASSES

The lazy query runs in streaming mode, so the rows need not fit into memory. Bins are (lower, upper]
as everywhere here; a confidence within rounding of an edge k/M may fall on its other side.
"""

import json
import sys

import polars as pl

# A likelihood of 0 has no logarithm.
SMALLEST = sys.float_info.min


def evaluate(folder: str, n_classes: int, n_bins: int = 15) -> dict[str, float]:
    label = pl.col("label")
    probs = [pl.col(f"prob_{c}").cast(pl.Float64) for c in range(n_classes)]
    of_row = pl.concat_list(probs)
    p = of_row.list.get(label)
    is_right = of_row.list.arg_max() == label
    squares = pl.sum_horizontal([prob**2 for prob in probs])
    rows = pl.scan_parquet(folder).select(
        confidence=pl.max_horizontal(probs),
        is_right=is_right.cast(pl.Int64),
        nll=-p.clip(SMALLEST).log(),
        brier=squares - 2 * p + 1,
    )
    confidence = pl.col("confidence")
    bin_of_row = (confidence * n_bins).ceil().clip(1).alias("bin")
    sums = pl.col("confidence", "is_right", "nll", "brier").sum()
    bins = rows.group_by(bin_of_row).agg(pl.len().alias("n"), sums)
    gaps = confidence - pl.col("is_right")
    n = pl.col("n").sum()
    found = bins.select(
        accuracy=pl.col("is_right").sum() / n,
        nll=pl.col("nll").sum() / n,
        brier=pl.col("brier").sum() / n,
        ece=gaps.abs().sum() / n,
    )
    return found.collect(engine="streaming").row(0, named=True)


if __name__ == "__main__":
    print(json.dumps(evaluate(sys.argv[1], int(sys.argv[2]))))
