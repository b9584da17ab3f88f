"""The recipes on real engines, two workers each, one of them killed in the middle: the result of one machine.

`make test-engines` runs them in an environment of their own.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet as pq
import pytest

from hf_calib.metrics import CalibrationState

RECIPES = Path(__file__).parents[2] / "recipes" / "engines"
N_CLASSES = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight files of 20,000 rows."""
    folder = tmp_path_factory.mktemp("predictions")
    for i in range(8):
        rng = np.random.default_rng(i)
        logits = 2 * rng.normal(size=(20_000, N_CLASSES))
        labels = (logits / 1.5 + rng.gumbel(size=logits.shape)).argmax(axis=1)
        probs = np.exp(logits)
        probs = (probs / probs.sum(axis=1, keepdims=True)).astype(np.float32)
        columns = {f"prob_{c}": probs[:, c] for c in range(N_CLASSES)}
        pq.write_table(
            pyarrow.table(
                {**columns, "label": labels.astype(np.int32), "other": labels}
            ),
            folder / f"part-{i}.parquet",
        )
    return folder


@pytest.fixture(scope="module")
def wanted(folder: Path) -> CalibrationState:
    """Of one process that reads all rows at once."""
    state = CalibrationState(n_classes=N_CLASSES)
    table = pq.read_table(folder)
    state.update(
        np.stack([table[f"prob_{c}"] for c in range(N_CLASSES)]).T, table["label"]
    )
    return state


def recipe(name: str) -> ModuleType:
    """A recipe, which workers can import too: Dask pickles functions by the names of their modules."""
    paths = [str(RECIPES), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    sys.path[:] = dict.fromkeys([str(RECIPES), *sys.path])
    return importlib.import_module(name)


def killing(state_of: Callable[..., Any], flag: str) -> Callable[..., Any]:
    """The same function, which kills its process the second time that it is called by any."""

    def of(*arguments: Any, **options: Any) -> Any:
        calls = len(os.listdir(flag))
        with open(os.path.join(flag, f"{os.getpid()}-{calls}"), "w"):
            pass
        if calls == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return state_of(*arguments, **options)

    return of


@pytest.fixture
def flag(tmp_path: Path) -> Iterator[str]:
    """A folder that shows after the test that a worker was killed and its work done again."""
    (tmp_path / "calls").mkdir()
    yield str(tmp_path / "calls")
    assert len(os.listdir(tmp_path / "calls")) > 2


def by_value(pickler: Any, module: ModuleType) -> None:
    """Send the functions of a recipe and of this file as they are, as those of a script are sent."""
    pickler.register_pickle_by_value(module)
    pickler.register_pickle_by_value(sys.modules[__name__])


def test_ray(folder: Path, wanted: CalibrationState, flag: str) -> None:
    ray = pytest.importorskip("ray", reason="make test-engines installs Ray")
    module = recipe("ray_data")
    by_value(ray.cloudpickle, module)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        assert module.evaluate(str(folder), N_CLASSES).compute() == pytest.approx(
            wanted.compute(), rel=1e-12
        )
        module.state_of = killing(module.state_of, flag)
        assert module.evaluate(str(folder), N_CLASSES).compute() == pytest.approx(
            wanted.compute(), rel=1e-12
        )
    finally:
        ray.shutdown()


def test_spark(folder: Path, wanted: CalibrationState, flag: str) -> None:
    sql = pytest.importorskip("pyspark.sql", reason="make test-engines installs Spark")
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.skip("Spark needs Java 17 or later on this machine")
    import pyspark.cloudpickle

    os.environ["PYSPARK_PYTHON"] = sys.executable
    module = recipe("spark")
    by_value(pyspark.cloudpickle, module)
    builder = sql.SparkSession.builder.master("local[2,4]").config(
        "spark.ui.enabled", "false"
    )
    spark = builder.config("spark.sql.files.maxPartitionBytes", 400_000).getOrCreate()
    try:
        assert module.evaluate(
            spark, str(folder), N_CLASSES
        ).compute() == pytest.approx(wanted.compute(), rel=1e-12)
        module.state_of = killing(module.state_of, flag)
        assert module.evaluate(
            spark, str(folder), N_CLASSES
        ).compute() == pytest.approx(wanted.compute(), rel=1e-12)
    finally:
        spark.stop()


def test_dask(folder: Path, wanted: CalibrationState, flag: str) -> None:
    distributed = pytest.importorskip(
        "distributed", reason="make test-engines installs Dask"
    )
    import cloudpickle

    module = recipe("dask_bag")
    by_value(cloudpickle, module)
    with distributed.LocalCluster(n_workers=0, dashboard_address=None) as cluster:
        worker = [
            sys.executable,
            "-m",
            "distributed.cli.dask_worker",
            cluster.scheduler_address,
            "--nthreads",
            "1",
        ]
        workers = [
            subprocess.Popen([*worker, "--no-nanny", "--no-dashboard"])
            for _ in range(2)
        ]
        try:
            with distributed.Client(cluster) as client:
                client.wait_for_workers(2, timeout=120)
                assert module.evaluate(
                    str(folder), N_CLASSES
                ).compute() == pytest.approx(wanted.compute(), rel=1e-12)
                module.state_of = killing(module.state_of, flag)
                assert module.evaluate(
                    str(folder), N_CLASSES
                ).compute() == pytest.approx(wanted.compute(), rel=1e-12)
                assert [each.poll() for each in workers].count(-signal.SIGKILL) == 1
        finally:
            for each in workers:
                each.kill()
                each.wait()


@pytest.mark.parametrize(("package", "name", "files"), [
    ("duckdb", "duckdb_sql", "/*.parquet"),
    ("polars", "polars_lazy", ""),
])  # fmt: skip
def test_queries(
    package: str, name: str, files: str, folder: Path, wanted: CalibrationState
) -> None:
    pytest.importorskip(package, reason=f"make test-engines installs {package}")
    found = recipe(name).evaluate(f"{folder}{files}", N_CLASSES)
    assert found.keys() == {"accuracy", "nll", "brier", "ece"}
    for key, value in found.items():
        assert value == pytest.approx(wanted.compute()[key], abs=1e-12), key


def test_recipes_are_short() -> None:
    names = {path.name for path in RECIPES.glob("*.py")}
    evaluating = {
        "dask_bag.py",
        "duckdb_sql.py",
        "polars_lazy.py",
        "ray_data.py",
        "spark.py",
    }
    assert names == evaluating
    for path in RECIPES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 55, path.name
