"""Everything the README names exists."""

from __future__ import annotations

import ast
import re
from importlib.metadata import metadata

import numpy as np
from before_and_after import RUNS
from results_tables import PAPERS
from safetensors.numpy import load_file
from saved_runs import Run, adafocal_bert, in_percent, runs

import hf_calib
from hf_calib.losses import LOSSES
from hf_calib.metrics import expected_calibration_error
from tests.helpers.places import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_uses_real_names() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    imported = [
        node
        for node in ast.walk(ast.parse(example))
        if isinstance(node, ast.ImportFrom)
    ]
    assert {alias.name for node in imported for alias in node.names} <= set(
        hf_calib.__all__
    )
    assert example in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert f"**{len(LOSSES)} losses**" in README


def test_commands_and_extras_exist() -> None:
    targets = set(
        re.findall(r"^(\S+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    )
    assert set(re.findall(r"make (\S+?)[\s`]", README)) <= targets
    extras = metadata("hf_calib").get_all("Provides-Extra")
    named = re.search(r"Extras: (.*?)\.", README)
    assert named is not None
    assert set(re.findall(r"`(\w+)`", named[1])) <= set(extras or ())


def test_the_oldest_versions_that_are_promised_are_those_that_are_tested() -> None:
    promised = dict(
        re.findall(
            r'^    "([\w-]+)>=([\d.]+)', (ROOT / "pyproject.toml").read_text(), re.M
        )
    )
    pinned = dict(
        re.findall(
            r"^([\w-]+)==([\d.]+)$",
            (ROOT / "constraints-oldest.txt").read_text(),
            re.M,
        )
    )
    for name in (
        "datasets",
        "matplotlib",
        "numpy",
        "scikit-learn",
        "scipy",
        "transformers",
    ):
        assert pinned[name].removesuffix(".0") == promised[name].removesuffix(".0")


def test_the_numbers_of_the_run_are_those_of_its_logits() -> None:
    """The sentence and the result line, here and on the site's first page."""
    run = Run.load(RUNS / "cross_entropy.safetensors")
    before, after, labels = run.probs["none"], run.probs["nll"], run.labels
    right = [np.mean(probs.argmax(axis=1) == labels) for probs in (before, after)]
    errors = [expected_calibration_error(probs, labels) for probs in (before, after)]
    n_rows = len(load_file(RUNS / "cross_entropy.safetensors")["calibration_labels"])
    for text in (README, (ROOT / "docs" / "index.md").read_text(encoding="utf-8")):
        words = " ".join(text.split())
        assert f"right on {right[0]:.0%} of the test posts" in words
        assert f"a mean confidence of {before.max(axis=1).mean():.0%}" in words
        after_it = f"{errors[1]:.3f} after one temperature, fitted to {n_rows} rows"
        assert f"ECE {errors[0]:.3f} before and {after_it}" in words
        assert f"accuracy {right[0]:.3f} before and after" in words
    assert f"{right[0]:.3f}" == f"{right[1]:.3f}"


def test_the_table_beside_the_papers_is_that_of_the_runs() -> None:
    """ECE in percent before and after a temperature, of saved logits and of the papers."""
    path = ROOT / "docs" / "results" / "papers_length.md"
    text = path.read_text(encoding="utf-8")
    folders = [
        runs(f"20newsgroups_{each}") for each in ("cnn_50_epochs", "minilm_10_epochs")
    ]
    rows = table_rows(text)
    assert len(rows) == 5
    for title, cnn, papers, minilm, bert in rows:
        loss = re.findall(r"`(\w+)`", title)[0]
        name = {"focal_calibration": "focal_calibration_20newsgroups"}.get(loss, loss)
        assert set(re.findall(r"[\d.]+, [\d.]+", papers)) <= set(
            PAPERS.get(name, ())
        ), loss
        assert bert == adafocal_bert.get(loss, ""), loss
        criterion = "adaptive_ece" if "equal-mass" in title else "ece"
        for found, printed in zip(folders, (cnn, minilm), strict=True):
            assert printed == in_percent(found[name], criterion, digits=1), loss
    page = " ".join(text.split())
    claims = re.findall(
        r"0\.\d+ \[0\.\d+, 0\.\d+\]|p 0\.\d+, corrected 0\.\d+",
        " ".join(README.split()),
    )
    assert len(claims) == 3
    assert all(each in page for each in claims)


def table_rows(text: str) -> list[list[str]]:
    """The cells of the rows below the first table's heading."""
    lines = text[text.index("\n| loss |") :].strip().split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
