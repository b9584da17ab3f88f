"""The studies as a user runs them, in small: what they write agrees with what the library says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from datasets import Dataset
from papers.dynamics import Trace, TrainingTrace
from PIL import Image

from tests.helpers.tiny import tiny_trainer
from tests.recipes.test_recipes import run


@pytest.fixture(scope="module")
def posts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Posts of three groups, with headers, whose words say the group most of the time."""
    folder = tmp_path_factory.mktemp("posts")
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 330)
    said = np.where(rng.random(330) < 0.8, labels, rng.integers(0, 3, 330))
    texts = [f"From: me\n\nword{word} and {rng.integers(9)} more" for word in said]
    for name, part in (("train", slice(0, 280)), ("test", slice(280, 330))):
        rows = {"text": texts[part], "label": labels[part].tolist()}
        Dataset.from_dict(rows).to_parquet(folder / f"{name}.parquet")
    return folder


def study(name: str, output: Path, *arguments: str) -> dict[str, Any]:
    """Run a study; return its JSON, once all its pictures were seen to be whole and nothing unfinished is left."""
    run(f"studies/{name}.py", "--output", str(output), *arguments)
    pictures = sorted(output.glob(f"{name}*.png"))
    assert pictures
    for picture in pictures:
        with Image.open(picture) as image:
            image.verify()
    assert set(output.iterdir()) == {
        output / f"{name}.json",
        *pictures,
        *output.glob(f"{name}.csv"),
    }
    record: dict[str, Any] = json.loads((output / f"{name}.json").read_text())
    assert {"settings", "seeds", "seconds"} <= set(record)
    if "--data" in arguments:  # results are shown to others
        assert arguments[arguments.index("--data") + 1] not in json.dumps(record)
    return record


@pytest.mark.slow
def test_proofs(tmp_path: Path) -> None:
    record = study("proofs", tmp_path, "--draws", "12")
    hold = (
        "fcl_4.1_two_classes",
        "fcl_4.1_three_classes",
        "fcl_a.4",
        "fcl_a.5",
        "fcl_a.6",
        "fcl_a.7",
    )
    for name in (*hold, "fcl_a.9_gamma_3", "bsce_gra_eq_12", "dfl_lemma_1"):
        assert record[name]["holds"] == record[name]["of"], name
    # Of 19 posteriors two claims of a posterior that is met hold at 1/2 alone; logit p = logit eta / (1 + gamma).
    assert record["bsce_gra_theorem"] == record["fcl_a.3"] == {"holds": 1, "of": 19}
    at_rest = record["bsce_gra_theorem_at_posterior_0.7"]
    for gamma in (0, 2, 4):
        assert at_rest[f"gamma {gamma}"] == pytest.approx(
            1 / (1 + (3 / 7) ** (1 / (1 + gamma))), abs=1e-9
        )
    against = record["fcl_4.5_counterexample"]
    assert against["prediction"] == pytest.approx(0.558, abs=5e-4)
    assert against["gap_of_focal"] == pytest.approx(0, abs=1e-12)
    assert against["gap_of_fcl"] == pytest.approx(0.0057, abs=5e-5)
    # FCL, gamma 3: the root of the slope, eta l'(p) = (1 - eta) l'(1 - p), the Brier term with a weight of .5.
    p = next(row for row in record["fcl_a.8"] if row["brier_weight"] == 0.5)[
        "minimum_at_posterior_0.7"
    ]
    slope = {
        q: -((1 - q) ** 3) / q + 3 * (1 - q) ** 2 * np.log(q) - 2 * (1 - q)
        for q in (p, 1 - p)
    }
    assert 0.7 * slope[p] == pytest.approx(0.3 * slope[1 - p], abs=1e-5)
    dual = record["dfl_theorem_1_counterexample"]
    assert dual["least"] < dual["least_in_the_posterior's_order"]


@pytest.mark.slow  # five pictures
def test_gradient_factors(tmp_path: Path) -> None:
    record = study("gradient_factors", tmp_path, "--resolution", "12")
    turning = record["inverse focal pushes the label down"]
    assert turning["first at p"] == pytest.approx(0.2785, abs=5e-5)
    assert turning["ranges"]["gamma 3.59"] is None
    low, high = turning["ranges"]["gamma 5"]
    assert low < turning["first at p"] < high
    moves = record["largest change of u and g while p_y stays"]
    assert (
        moves["u: focal, gamma 2"] < 1e-12 < 0.1 < moves["u: Brier-weighted, gamma 2"]
    )
    # The closed form and the search agree: dual focal is over-confident, focal is not.
    for way in (
        "minimisers over the simplex of three classes",
        "found on a grid, over the posteriors",
    ):
        focal, dual = record[way].values()
        assert focal["share over-confident"] == 0
        assert dual["share over-confident"] > 0.4


@pytest.mark.slow
def test_norms_and_entropies(tmp_path: Path, shared_data: Path) -> None:
    rows = ("--train_rows", "300", "--calibration_rows", "200", "--test_rows", "300")
    weights = (
        "--orders",
        "1",
        "2",
        "--norm_weights",
        "0.01",
        "0.3",
        "--entropy_weights",
        "1",
    )
    data = ("--data", str(shared_data / "mnist"), "--seeds", "0", "1", "--epochs", "6")
    record = study("norms_and_entropies", tmp_path, *data, *rows, *weights)
    found = {(row["penalty"], row["weight"]): row for row in record["results"]}
    plain = found["cross entropy", 0.0]
    heavy, light = (
        found["L2 norm", weight]["mean L2 norm"]["value"] for weight in (0.3, 0.01)
    )
    assert heavy < light < plain["mean L2 norm"]["value"]
    assert (
        found["entropy", 1.0]["mean entropy"]["value"] > plain["mean entropy"]["value"]
    )


# A study, its options, how many pictures it draws, and how many rows its record has.
FEW_STEPS = "--seeds 0 --rows 256 --validation_rows 40 --epochs"  # 4 steps an epoch
RUNS = [
    ("overhead", f"{FEW_STEPS} 2", 1, ("runs", 6)),
    ("validation_and_training", f"{FEW_STEPS} 3", 2, ("runs", 4)),
    ("gamma_dynamics", f"{FEW_STEPS} 3", 3, ("runs", 12)),
    ("confidence_dynamics", f"{FEW_STEPS} 5", 4, ("runs", 4)),
    ("last_layer_gradients", "--seeds 0 --epochs 4", 2, ("results", 16)),
    (
        "five_gaussians",
        "--seeds 0 1 --train_points 400 --test_points 100 --epochs 1",
        1,
        ("results", 3),
    ),
    (
        "decision_boundary",
        "--seeds 0 1 --train_points 200 --test_points 300 --epochs 20",
        1,
        ("results", 3),
    ),
]


@pytest.mark.parametrize(
    ("name", "options", "n_pictures", "rows"),
    [
        pytest.param(
            *each, marks=() if each[0] == "five_gaussians" else pytest.mark.deep
        )
        for each in RUNS
    ],
)
def test_it_runs(
    name: str,
    options: str,
    n_pictures: int,
    rows: tuple[str, int],
    posts: Path,
    tmp_path: Path,
) -> None:
    data = (
        ()
        if name in ("five_gaussians", "decision_boundary")
        else ("--data", str(posts))
    )
    record = study(name, tmp_path, *data, *options.split())
    assert len(record[rows[0]]) == rows[1]
    assert len(list(tmp_path.glob("*.png"))) == n_pictures


@pytest.mark.slow
def test_smooth_calibration(posts: Path, tmp_path: Path) -> None:
    small = ("--seeds", "0", "--largest", "300", "--largest_program", "100")
    record = study("smooth_calibration", tmp_path, "--data", str(posts), *small)
    assert (
        record["samples_within_the_bounds"]
        == record["samples"]
        == len(record["points"])
    )
    assert record["largest_difference_to_the_program"] < 1e-9
    assert [row["rows"] for row in record["times"]] == [100, 300]


@pytest.mark.slow
def test_post_processing_gap(posts: Path, tmp_path: Path) -> None:
    grid = ("--gammas", "0", "3", "--lambdas", "0", "2")
    record = study(
        "post_processing_gap", tmp_path, "--data", str(posts), *grid, "--epochs", "3"
    )
    assert [(row["gamma"], row["lambda"]) for row in record["results"]] == [
        (0, 0),
        (0, 2),
        (3, 0),
        (3, 2),
    ]
    for row in record["results"]:
        smooth = row["smooth_calibration_error_dual"]
        assert smooth**2 - 1e-9 <= row["gap_over_updates"] <= 2 * smooth + 1e-9
        assert row["gap_over_maps"] >= 0
        assert len(row["nll_by_epoch"]) == 3


@pytest.mark.slow
def test_small_claims(
    posts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = (
        "--rows",
        "128",
        "--validation_rows",
        "30",
        "--test_rows",
        "40",
        "--epochs",
        "2",
    )
    of_page = (
        "--pages",
        "focal_calibration",
        "--seeds",
        "0",
        "1",
        "--data",
        str(posts),
        *sizes,
    )
    record = study("small_claims", tmp_path, *of_page)
    assert len(pd.read_csv(tmp_path / "small_claims.csv")) == 10
    capsys.readouterr()
    assert (
        study("small_claims", tmp_path, *of_page, "--resume") == record
    )  # nothing is trained a second time
    assert "seed 0" not in capsys.readouterr().out


@pytest.mark.deep
def test_figures_of_ones_own_trainings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    each_epoch = {"eval_strategy": "epoch", "num_train_epochs": 3, "n_bins": 5}
    folders = {loss: tmp_path / loss for loss in ("focal", "adafocal")}
    for loss, folder in folders.items():
        of_table = {"loss_kwargs": {"n_bins": 5}} if loss == "adafocal" else {}
        trainer = tiny_trainer(folder, loss=loss, **of_table, **each_epoch)
        trainer.add_callback(TrainingTrace(trainer, test_dataset=trainer.eval_dataset))
        trainer.train()
    record = study(
        "traced_trainings", tmp_path / "figures", *map(str, folders.values())
    )
    for found, folder in zip(record["trainings"], folders.values(), strict=True):
        assert found["ece"] == pytest.approx(
            Trace.load(folder).sets["eval"].ece, rel=1e-3
        )
        assert found["test_rows"]["ece"] == found["ece"]
    names = {
        path.stem.removeprefix("traced_trainings_")
        for path in (tmp_path / "figures").glob("*.png")
    }
    assert names == {
        "ece",
        "max_logit",
        "rival",
        "learned",
        "gaps",
        "correspondence",
        "gammas",
    }
    with pytest.raises(SystemExit):
        run(
            "studies/traced_trainings.py",
            str(tmp_path),
            "--output",
            str(tmp_path / "none"),
        )
    assert (
        "training_trace.json to be a file of TrainingTrace, got no such file"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        (
            "five_gaussians",
            ("--seeds", "3"),
            "expected at least 2, all different, none below 0, got 3",
        ),
        (
            "overhead",
            ("--seeds", "0", "-1"),
            "expected at least 1, all different, none below 0, got 0 -1",
        ),
        ("overhead", ("--epochs", "0"), "expected a whole number of at least 1, got 0"),
        (
            "overhead",
            ("--output", __file__),
            "expected a folder that can be written, got",
        ),
        (
            "post_processing_gap",
            ("--gammas", "0", "-1"),
            "expected a number, at least 0, got -1",
        ),
        (
            "post_processing_gap",
            ("--lambdas", "1", "1"),
            "expected at least 2, all different, none below 0, got 1 1",
        ),
        (
            "smooth_calibration",
            ("--largest", "50"),
            "expected at least 100 rows, got 50",
        ),
    ],
)
def test_wrong_options_are_said_before_any_work(
    name: str,
    arguments: tuple[str, ...],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        run(f"studies/{name}.py", "--output", str(tmp_path), *arguments)
    assert f"argument {arguments[0]}: {said}" in capsys.readouterr().err
