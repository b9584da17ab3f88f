"""The calibration of predictions in parquet with Dask: python recipes/engines/dask_bag.py FOLDER N_CLASSES [SCHEDULER]

Each file becomes a state on the worker that reads it, batch by batch; a tree merges the states.
"""

import json
import sys

import dask.bag
import fsspec
import numpy as np
import pyarrow.parquet
from dask.distributed import Client

from hf_calib.metrics import CalibrationState


def state_of(path: str, n_classes: int) -> CalibrationState:
    columns = [f"prob_{c}" for c in range(n_classes)]
    state = CalibrationState(n_classes=n_classes)
    with fsspec.open(path, "rb") as file:
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(
            2**17, columns=[*columns, "label"]
        ):
            state.update(
                np.stack([batch.column(name) for name in columns]).T,
                batch.column("label"),
            )
    return state


def evaluate(folder: str, n_classes: int) -> CalibrationState:
    files, _, paths = fsspec.get_fs_token_paths(f"{folder.rstrip('/')}/*.parquet")
    addresses = [files.unstrip_protocol(path) for path in paths]
    states = dask.bag.from_sequence(addresses, partition_size=1).map(
        state_of, n_classes=n_classes
    )
    return states.fold(CalibrationState.merge, split_every=8).compute()


if __name__ == "__main__":
    with Client(*sys.argv[3:]):
        print(json.dumps(evaluate(sys.argv[1], int(sys.argv[2])).compute()))
