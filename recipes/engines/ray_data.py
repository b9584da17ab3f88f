"""The calibration of predictions in parquet with Ray Data: python recipes/engines/ray_data.py FOLDER N_CLASSES

Each batch becomes a state of a few kilobytes, and the states are merged as they arrive; no row
leaves its worker. (An `AggregateFnV2` would do the same, but `Dataset.aggregate` holds its input.)
"""

import json
import sys

import numpy as np
import pyarrow
import ray

from hf_calib.metrics import CalibrationState


def state_of(batch: pyarrow.Table, n_classes: int) -> pyarrow.Table:
    state = CalibrationState(n_classes=n_classes)
    probs = np.stack([batch.column(f"prob_{c}") for c in range(n_classes)]).T
    state.update(probs, batch.column("label"))
    return pyarrow.table({"state": [state.to_bytes()]})


def evaluate(folder: str, n_classes: int) -> CalibrationState:
    columns = [*(f"prob_{c}" for c in range(n_classes)), "label"]
    rows = ray.data.read_parquet(folder).select_columns(columns)
    states = rows.map_batches(
        state_of,
        batch_format="pyarrow",
        batch_size=2**17,
        fn_kwargs={"n_classes": n_classes},
    )
    found = CalibrationState(n_classes=n_classes)
    for row in states.iter_rows():
        found.merge(CalibrationState.from_bytes(row["state"]))
    return found


if __name__ == "__main__":
    print(json.dumps(evaluate(sys.argv[1], int(sys.argv[2])).compute()))
