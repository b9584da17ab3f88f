"""ECE, NLL and Brier score of predictions with Polars: python recipes/engines/polars_lazy.py FOLDER N_CLASSES

The lazy query runs in streaming mode, so the rows need not fit into memory. Bins are (lower, upper] as everywhere
here; a confidence within rounding of an edge k/M may fall on its other side.
"""

import json
import sys

import polars as pl


def evaluate(folder: str, n_classes: int, n_bins: int = 15) -> dict[str, float]:
    probs = [pl.col(f"prob_{c}").cast(pl.Float64) for c in range(n_classes)]
    confidence = pl.max_horizontal(probs)
    p, is_right = pl.lit(None), pl.lit(False)
    for c, prob in reversed(list(enumerate(probs))):
        p = pl.when(pl.col("label") == c).then(prob).otherwise(p)
        is_right = (
            pl.when(prob == confidence).then(pl.col("label") == c).otherwise(is_right)
        )
    rows = pl.scan_parquet(folder).select(
        confidence=confidence,
        is_right=is_right.cast(pl.Int64),
        nll=-p.clip(2.2250738585072014e-308).log(),
        brier=pl.sum_horizontal([prob**2 for prob in probs]) - 2 * p + 1,
    )
    bins = rows.group_by(
        (pl.col("confidence") * n_bins).ceil().clip(1).alias("bin")
    ).agg(pl.len().alias("n"), pl.col("confidence", "is_right", "nll", "brier").sum())
    n = pl.col("n").sum()
    found = bins.select(
        accuracy=pl.col("is_right").sum() / n,
        nll=pl.col("nll").sum() / n,
        brier=pl.col("brier").sum() / n,
        ece=(pl.col("confidence") - pl.col("is_right")).abs().sum() / n,
    )
    return found.collect(engine="streaming").row(0, named=True)


if __name__ == "__main__":
    print(json.dumps(evaluate(sys.argv[1], int(sys.argv[2]))))
