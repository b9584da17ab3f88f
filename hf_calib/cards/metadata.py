"""The metadata of a model card: what the Hub's own checklist asks for, and the results as a model-index."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCard

from hf_calib._text import is_hub_name
from hf_calib.cards.facts import Facts, Results, text, title_of_metric
from hf_calib.metrics.sums import Interval

logger = logging.getLogger(__name__)

TAGS = ("calibration", "hf_calib")
_OURS = "hf_calib"  # marks our results among others


def update_metadata(
    data: Any,
    facts: Facts,
    *,
    model_name: str,
    license: str | None = None,
    language: str | Sequence[str] | None = None,
    datasets: str | Sequence[str] | None = None,
    base_model: str | None = None,
) -> None:
    """Fill in what is known and not there yet; what a caller gives replaces what is there.

    Args:
        data: of the card, changed in place.
        facts: of the model's folder.
        model_name: for the results, where the card has no name yet.
        license: None takes the card's, or else that of the base model's card.
        language: None leaves the card's.
        datasets: names on the Hub; None takes the card's, or else those of the splits.
        base_model: None takes the card's, or else the one in calibration.json.
    """
    record = facts.record or {}
    data.library_name = "transformers"  # adapters, which were trained with peft, are merged
    data.tags = sorted({*_names(data.tags), *(TAGS if facts.record is not None else ())})
    if facts.task is not None and not data.pipeline_tag:
        data.pipeline_tag = facts.task.pipeline
    named = [
        name
        for name in _names(base_model or data.base_model or text(record, "base_model"))
        if is_hub_name(name)
    ]
    data.base_model = named[0] if len(named) == 1 else named or None
    if named and not data.get("base_model_relation"):
        data["base_model_relation"] = "finetune"
    data.datasets = _datasets(_names(datasets) or _names(data.datasets), facts)
    if language is not None:
        data.language = _names(language)
    data.license = license or data.license or _license_of(named)
    if data.license is None:
        logger.warning(
            "The model card has no license: that of the base model is not known. Add a line such as `license: mit` to "
            "the first lines of README.md, or pass license to create_model_card or push_to_hub."
        )
    others = [each for each in data.eval_results or [] if not _is_ours(each)]
    if facts.results is not None:
        data.model_name = data.model_name or model_name
        data.eval_results = [*others, *_eval_results(facts, facts.results, data.datasets)]
    elif facts.record is not None:  # ours were of other weights, which the section does not show either
        data.eval_results = others or None


def _datasets(given: Sequence[str], facts: Facts) -> list[str] | None:
    """Names of datasets; those of the splits have their owners, which the Trainer's own card leaves out."""
    known = [split.name for split in facts.splits.values() if split.name and "/" in split.name]
    owned = {name.split("/")[1]: name for name in known}
    names = [owned.get(name, name) for name in given] or known
    return list(dict.fromkeys(name for name in names if is_dataset_name(name))) or None


def _names(value: object) -> list[str]:
    values = [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else []
    return [each for each in values if isinstance(each, str) and each]


# Builders of the datasets library that read local files: no names of datasets.
_PACKAGED = {
    *(
        "arrow",
        "audiofolder",
        "cache",
        "csv",
        "generator",
        "hdf5",
        "imagefolder",
        "json",
        "pandas",
        "parquet",
    ),
    *("pdffolder", "spark", "sql", "text", "videofolder", "webdataset", "xml"),
}


def is_dataset_name(name: object) -> bool:
    """Whether a name can be that of a dataset on the Hub, and is none of a reader of local files.

    >>> [is_dataset_name(name) for name in ("fancyzhx/ag_news", "csv", "my data", None)]
    [True, False, False, False]
    """
    return is_hub_name(name) and name not in _PACKAGED


def _license_of(base_models: Sequence[str]) -> str | None:
    """The license on the card of the only base model, if the Hub can be asked."""
    if len(base_models) != 1:
        return None
    try:
        found = ModelCard.load(base_models[0], ignore_metadata_errors=True).data.license
    except Exception as error:  # whatever happens there, the card goes without it
        logger.debug("No license of %s: %r", base_models[0], error)
        return None
    return found if isinstance(found, str) else None


def _is_ours(result: EvalResult) -> bool:
    return isinstance(result.metric_args, dict) and result.metric_args.get("source") == _OURS


def _eval_results(facts: Facts, results: Results, datasets: Sequence[str] | None) -> list[EvalResult]:
    """Of the model as it is served under the metrics' own names, then of its other state under longer ones."""
    served = "value" if "value" in results.metrics else "after" if facts.folded else "before"
    name, split = results.rows.name, results.rows.split
    if name is None and datasets is not None and len(datasets) == 1:
        name = datasets[0]
    found = []
    for column in sorted(results.metrics, key=lambda column: column != served):
        end = "" if column == served else f"_{column}_calibration"
        name_end = "" if column == served else f", {column} calibration"
        for key, value in results.metrics[column].items():
            found.append(
                EvalResult(
                    task_type="text-classification" if facts.task is None else facts.task.pipeline,
                    dataset_type=name if name is not None and name in (datasets or ()) else "custom",
                    dataset_name=name or "own data",
                    dataset_split=split,
                    metric_type=f"{key}{end}",
                    metric_name=f"{title_of_metric(key)}{name_end}",
                    metric_value=value.value,
                    metric_args=_arguments(value, results),
                )
            )
    return found


def _arguments(value: Interval, results: Results) -> dict[str, object]:
    interval = (
        {} if value.low is None else {f"interval_{100 * (results.level or 0):g}": [value.low, value.high]}
    )
    return {"source": _OURS, **({} if results.n_bins is None else {"n_bins": results.n_bins}), **interval}
