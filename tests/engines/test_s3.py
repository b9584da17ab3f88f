"""Predictions in an S3 store, as its own protocol and s3fs have it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet as pq
import pytest

pytest.importorskip("s3fs", reason="make test-engines installs s3fs")
server = pytest.importorskip("moto.server", reason="make test-engines installs moto")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a new bucket."""
    import s3fs

    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "made-up",
        "AWS_SECRET_ACCESS_KEY": "made-up",
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        s3fs.S3FileSystem().makedirs("bucket", exist_ok=True)
        yield "s3://bucket"
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        running.stop()


def test_shards(bucket: str, tmp_path: Path) -> None:
    import s3fs

    from hf_calib.predictions import read_predictions

    for i in range(3):
        probs = np.random.default_rng(i).dirichlet(np.ones(3), 500)
        table = {f"prob_{c}": probs[:, c] for c in range(3)} | {
            "label": probs.argmax(axis=1)
        }
        pq.write_table(pyarrow.table(table), tmp_path / f"part-{i}.parquet")
    s3fs.S3FileSystem().put(str(tmp_path), "bucket/run", recursive=True)
    there = read_predictions(f"{bucket}/run").predictions
    here = read_predictions(tmp_path).predictions
    np.testing.assert_array_equal(there.probabilities(), here.probabilities())
    np.testing.assert_array_equal(there.labels, here.labels)
    with pytest.raises(
        ValueError,
        match=r"expected s3://no-such-bucket/run to be readable, got .*NoSuchBucket|exist",
    ):
        read_predictions("s3://no-such-bucket/run")
