"""The calibration section of a model card: loss, splits, and all metrics before and after the calibration map."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from huggingface_hub import ModelCard
from transformers.utils import CONFIG_NAME

from hf_calib._files import whole_file
from hf_calib._markdown import escape
from hf_calib.export.decisions_card import decision_lines
from hf_calib.metrics.logged import LOGGED_METRICS
from hf_calib.plots import reliability_diagram, save_figure
from hf_calib.scaling.saved_map import MAP_NAME, map_title

if TYPE_CHECKING:
    from hf_calib.trainer.evaluation_pass import EvaluationPass

TAGS = ("calibration", "hf_calib")
HEADING = "## Calibration"
FIGURE = "reliability.png"
_FEW = 6  # numbers of a parameter that a reader can take in


def add_calibration_section(
    folder: Path, record: Mapping[str, Any], evaluation: EvaluationPass | None
) -> None:
    """Append the section to the card in the folder, replacing an earlier one, and tag the card.

    Args:
        folder: holds the card, README.md; the reliability diagram is saved beside it. Whether the map is in
            the weights is read from the folder's config.json.
        record: the model config's `calibration`.
        evaluation: the last one; its metrics are shown if they were also computed with the map.
    """
    metrics: dict[str, float] = {}
    if evaluation is not None and evaluation.calibrated is not None:
        metrics = evaluation.metrics()
        diagram = reliability_diagram(evaluation.panels(), n_bins=evaluation.n_bins)
        save_figure(diagram, folder / FIGURE)
    prefix = evaluation.prefix if evaluation is not None else "eval"
    card = ModelCard.load(folder / "README.md")
    card.data.library_name = "transformers"  # adapters, which were trained with peft, are merged
    card.data.tags = sorted({*(card.data.tags or []), *TAGS})
    before = card.text.split(f"\n{HEADING}\n")[0].rstrip()
    section = calibration_section({**record, "folded": _is_folded(folder)}, metrics, prefix)
    card.text = "\n".join([before, "", section, *decision_lines(folder), ""])
    with whole_file(folder / "README.md") as unfinished:
        card.save(unfinished)


def calibration_section(record: Mapping[str, Any], metrics: Mapping[str, float], prefix: str = "eval") -> str:
    """The section's Markdown.

    Args:
        record: the model config's `calibration`; "folded" tells whether the map is in the weights.
        metrics: of an evaluation, `eval_ece` and so on, with and without `_calibrated`; or none.
        prefix: their prefix, "eval" for the evaluation split.

    >>> record = {"method": "vector", "loss": "focal", "n_examples": 100, "split": "calibration"}
    >>> print(calibration_section(record, {"eval_ece": 0.2, "eval_ece_calibrated": 0.02}))
    ## Calibration
    ...
    | Metric | Before | After vector scaling |
    |---|---|---|
    | Expected calibration error (ECE) | 0.2000 | 0.0200 |
    ...
    """
    split = "evaluation" if prefix == "eval" else prefix
    title = escape(_title(record))
    lines = [HEADING, "", *_training_lines(record)]
    rows = [
        f"| {row.title} | {metrics[f'{prefix}_{name}']:.4f} | {metrics[f'{prefix}_{name}_calibrated']:.4f} |"
        for name, row in LOGGED_METRICS.items()
        if f"{prefix}_{name}_calibrated" in metrics
    ]
    if rows:
        lines += ["", f"On the {escape(split)} split:", ""]
        lines += [f"| Metric | Before | After {title} |", "|---|---|---|", *rows]
        lines += ["", f"![Reliability diagram before and after {title}]({FIGURE})"]
    if rows and record.get("split") == split:
        lines += ["", "The map was fitted on these same examples, so the metrics after it are optimistic."]
    return "\n".join(lines)


def _is_folded(folder: Path) -> bool:
    """Whether the model that lies in the folder has a map in its head."""
    path = folder / CONFIG_NAME
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return bool((config.get("calibration") or {}).get("folded"))


def _training_lines(record: Mapping[str, Any]) -> list[str]:
    hyperparameters = ", ".join(
        f"{name}={value}" for name, value in (record.get("loss_kwargs") or {}).items()
    )
    where = (
        f". It is not in the weights: {MAP_NAME} holds it as the weight and bias that turn logits into "
        "calibrated ones."
    )
    if record.get("folded"):
        where = " and folded into the classification head: the model returns calibrated probabilities."
    loss = str(record.get("loss", "unknown")) + (f" ({hyperparameters})" if hyperparameters else "")
    title = _title(record)
    return [
        f"Trained with the loss {escape(loss)}.",
        f"{escape(title[0].upper() + title[1:])}{_parameters(record)} was fitted on "
        f"{escape(str(record.get('n_examples')))} examples of the {escape(str(record.get('split')))} split{where}",
    ]


def _title(record: Mapping[str, Any]) -> str:
    choice = record.get("choice")
    return map_title(str(record.get("method", "temperature")), None if choice is None else str(choice))


def _parameters(record: Mapping[str, Any]) -> str:
    """The map's parameters in brackets, where they are few, and what it minimised."""
    said = []
    for name in ("temperature", "temperatures", "weight", "bias"):
        numbers = np.array(record.get(name, ()), dtype=np.float64).reshape(-1)
        if 0 < len(numbers) <= _FEW:
            said.append(f"{name} {', '.join(f'{number:.4f}' for number in numbers)}")
    if "criterion" in record:
        said.append(f"criterion: {escape(str(record['criterion']))}")
    return f" ({'; '.join(said)})" if said else ""
