"""The metadata of a model card: what the Hub's own checklist asks for,
and the results as a model-index.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, hf_hub_download

from hf_calib._hub import CARD, read_card
from hf_calib._text import is_hub_name
from hf_calib.cards.facts import Facts, Results

logger = logging.getLogger(__name__)

# This value marks our results among those of others.
_OURS = "hf_calib"
# These are readers of local files in the datasets library, not names of datasets.
_PACKAGED = {
    "arrow",
    "audiofolder",
    "cache",
    "csv",
    "generator",
    "hdf5",
    "imagefolder",
    "json",
    "pandas",
}
_PACKAGED |= {
    "parquet",
    "pdffolder",
    "spark",
    "sql",
    "text",
    "videofolder",
    "webdataset",
    "xml",
}


def update_metadata(
    data: Any, facts: Facts, model_name: str, given: Mapping[str, Any]
) -> None:
    """Fill in missing metadata from the facts; values that a caller gives replace existing ones."""
    # Adapters, which were trained with peft, are merged.
    data.library_name = "transformers"
    data.tags = sorted(
        {*_names(data.tags), *(("calibration", "hf_calib") if facts.record else ())}
    )
    if facts.task is not None and not data.pipeline_tag:
        data.pipeline_tag = facts.task.pipeline
    bases = _names(
        given["base_model"] or data.base_model or facts.record.get("base_model")
    )
    named = [name for name in bases if is_hub_name(name)]
    data.base_model = named[0] if len(named) == 1 else named or None
    if named and not data.get("base_model_relation"):
        data["base_model_relation"] = "finetune"
    data.datasets = _datasets(_names(given["datasets"]) or _names(data.datasets), facts)
    if given["language"] is not None:
        data.language = _names(given["language"])
    data.license = given["license"] or data.license
    if data.license is None and len(named) == 1:
        # If the Hub cannot be read, the card has no license.
        with suppress(Exception):
            card = Path(hf_hub_download(named[0], CARD))
            data.license = read_card(card, is_ours=False).data.license
    if data.license is None:
        logger.warning(
            "The model card has no license: that of the base model is not known. Add a line such as `license: mit` to "
            "the first lines of README.md, or pass license to create_model_card or push_to_hub."
        )
    others = [
        each
        for each in data.eval_results or []
        if (each.metric_args or {}).get("source") != _OURS
    ]
    if facts.results is not None:
        data.model_name = data.model_name or model_name
        data.eval_results = [
            *others,
            *_eval_results(facts, facts.results, data.datasets or []),
        ]
    else:
        # Our results were of other weights, and the section does not show them either.
        data.eval_results = others or None


def is_dataset_name(name: object) -> bool:
    """Whether a name can be that of a dataset on the Hub, and is not a reader of local files.

    >>> [is_dataset_name(name) for name in ("fancyzhx/ag_news", "csv", "my data", None)]
    [True, False, False, False]
    """
    return is_hub_name(name) and name not in _PACKAGED


def _names(value: str | Sequence[str] | None) -> list[str]:
    values = [value] if isinstance(value, str) else value
    # A card of another program may hold anything.
    if not isinstance(values, Sequence):
        return []
    return [each for each in values if isinstance(each, str)]


def _datasets(given: Sequence[str], facts: Facts) -> list[str] | None:
    """Names of datasets, with their owners from the splits,
    which the Trainer's own card leaves out.
    """
    used = (facts.record.get("data") or {}).values()
    known = [rows["name"] for rows in used if "/" in rows.get("name", "")]
    owned = {name.split("/")[1]: name for name in known}
    names = [owned.get(name, name) for name in given] or known
    return list(dict.fromkeys(filter(is_dataset_name, names))) or None


def _eval_results(
    facts: Facts, results: Results, datasets: Sequence[str]
) -> list[EvalResult]:
    """Results of the model as it is served under the metrics' names,
    then of its other state under longer names.
    """
    served = (
        "value" if "value" in results.columns else "after" if facts.folded else "before"
    )
    name = results.about.get("name") or (
        datasets[0] if len(datasets) == 1 else "own data"
    )
    found = []
    for column in sorted(results.columns, key=lambda column: column != served):
        for key, metric in results.columns[column].items():
            args: dict[str, object] = {"source": _OURS, "n_bins": results.n_bins}
            if results.level is not None and metric["low"] is not None:
                args[f"interval_{100 * results.level:g}"] = [
                    metric["low"],
                    metric["high"],
                ]
            result = EvalResult(
                task_type="text-classification"
                if facts.task is None
                else facts.task.pipeline,
                dataset_type=name if name in datasets else "custom",
                dataset_name=name,
                dataset_split=results.about.get("split"),
                metric_type=key if column == served else f"{key}_{column}_calibration",
                metric_name=metric["title"]
                + ("" if column == served else f", {column} calibration"),
                metric_value=metric["value"],
                metric_args=args,
            )
            found.append(result)
    return found
