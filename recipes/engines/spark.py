"""The calibration of predictions in parquet with Spark: spark-submit recipes/engines/spark.py FOLDER N_CLASSES

Each partition becomes a state of a few kilobytes, in Python workers that read Arrow batches; a tree
merges them.
"""

import json
import sys
from collections.abc import Iterator

import numpy as np
import pyarrow
from pyspark.sql import Row, SparkSession

from hf_calib.metrics import CalibrationState


def state_of(
    batches: Iterator[pyarrow.RecordBatch], n_classes: int
) -> CalibrationState:
    state = CalibrationState(n_classes=n_classes)
    for batch in batches:
        probs = np.stack([batch.column(f"prob_{c}") for c in range(n_classes)]).T
        state.update(probs, batch.column("label"))
    return state


def evaluate(spark: SparkSession, folder: str, n_classes: int) -> CalibrationState:
    def states(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        yield pyarrow.RecordBatch.from_pydict(
            {"state": [state_of(batches, n_classes).to_bytes()]}
        )

    def add(found: CalibrationState, row: Row) -> CalibrationState:
        return found.merge(CalibrationState.from_bytes(bytes(row.state)))

    rows = spark.read.parquet(folder).select(
        *(f"prob_{c}" for c in range(n_classes)), "label"
    )
    parts = rows.mapInArrow(states, "state binary").rdd
    return parts.treeAggregate(
        CalibrationState(n_classes=n_classes), add, CalibrationState.merge
    )


if __name__ == "__main__":
    print(
        json.dumps(
            evaluate(
                SparkSession.builder.getOrCreate(), sys.argv[1], int(sys.argv[2])
            ).compute()
        )
    )
