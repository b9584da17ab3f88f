"""A calibrated model: saved in a folder, and checked through a pipeline with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import transformers
from numpy.typing import NDArray

from hf_calib._errors import expected
from hf_calib._names import is_hub_name
from hf_calib.export.fingerprint import fingerprint
from hf_calib.export.fold import OF_THE_MAP, check_can_be_folded
from hf_calib.export.saving import standalone_copy, write_folded
from hf_calib.export.unfold import unfold
from hf_calib.predictions.pipelines import pipeline
from hf_calib.predictions.tokens import LabelledTokens
from hf_calib.scaling.saved_map import map_title, recorded_in, save_map

if TYPE_CHECKING:
    from hf_calib.commands.inputs import Labelled

_SERVED = 8
_SERVED_TOLERANCE = 1e-4  # of a probability: float32, and batches that are padded otherwise


@dataclass(frozen=True)
class Original:
    """A model that is to be calibrated, without a map in its head.

    Args:
        source: its name.
        rows: those that a scaler is fitted on.
        classifier: the model, with what reads the rows.
        training: what its config says of its training.
        notes: on the map that it had.
        trust_remote_code: whether code that comes with the model may run.
    """

    source: str
    rows: Labelled
    classifier: Any
    training: Mapping[str, Any]
    notes: tuple[str, ...]
    trust_remote_code: bool

    @classmethod
    def load(cls, source: str, rows: Labelled, *, trust_remote_code: bool, **kind: bool) -> Original:
        """Load a model for these rows, of a kind that they have, and undo a map in its head.

        Raises:
            ValueError: if it cannot be loaded, does not fit, or cannot be folded whatever the scaler.
        """
        classifier: Any = rows.load_classifier(source, trust_remote_code=trust_remote_code, **kind)
        notes: tuple[str, ...] = ()
        record = recorded_in(classifier.model.config)
        if record.get("folded"):
            how = unfold(classifier.model).sentence()
            title = map_title(str(record.get("method", "temperature")))
            notes = (
                f"{source} had {title} in its head, which was undone first. {how} The new map replaces it.",
            )
        recorded = check_can_be_folded(classifier.model)
        training = {key: value for key, value in recorded.items() if key not in OF_THE_MAP}
        return cls(source, rows, classifier, training, notes, trust_remote_code)

    def save_calibrated(
        self,
        folder: Path,
        scaler: Any,
        data: Any,
        logits: NDArray[Any],
        *,
        fitting: Mapping[str, Any],
        measured_on: Mapping[str, Any],
        method: str | None = None,
    ) -> tuple[str, float]:
        """Save the model with its map, and check the probabilities that a pipeline gives with it.

        Args:
            folder: for the model; see `whole_folder`.
            scaler: the fitted one.
            data: the rows, loaded.
            logits: (N, C) of these.
            fitting: how the scaler was fitted, for the record, with "n_examples".
            measured_on: which rows the report is on, for the record.
            method: of a map to be saved beside the model; None folds it into the head.

        Returns:
            The fingerprint of the saved weights, and the largest difference between the probabilities of the pipeline
            and of the scaler.

        Raises:
            ValueError: if the scaler cannot be folded.
            RuntimeError: if the difference is more than rounding.
        """
        about = {
            **{key: self.training[key] for key in ("loss", "loss_kwargs") if key in self.training},
            **fitting,
            "data": {"calibration": {**self.rows.source(), "n": fitting["n_examples"]}, "test": measured_on},
            **({"base_model": self.source} if is_hub_name(self.source) else {}),
        }
        rows, classifier = self.rows, self.classifier
        first: Any = rows.as_served(data, _SERVED)
        first_logits = logits[: len(first)]
        if isinstance(rows, LabelledTokens):
            # A pipeline cuts the text into words by itself, and scores each sub-word.
            first_logits = rows.served_logits(classifier, first)
        serve = partial(self._served_scores, folder, first)
        plain = standalone_copy(classifier.model)
        plain.config.calibration = {**self.training, **fitting}
        processing = classifier.processing_class
        if method is None:
            batch = rows.first_batch(classifier, first)
            weights = write_folded(
                plain, scaler, folder, batch=batch, processing_class=processing, about=about
            )
            served = serve(transformers.pipeline)
        else:
            plain.config.calibration |= {"method": method, "folded": False}
            plain.save_pretrained(folder)
            processing.save_pretrained(folder)
            weights = fingerprint(plain)
            save_map(scaler, folder, {**about, "folded": False, "fingerprint": weights})
            served = serve(pipeline)
            # On the very logits that are served: a step turns their last bit into another probability.
            first_logits = serve(transformers.pipeline, function_to_apply="none")
        difference = float(np.nanmax(np.abs(served - scaler.predict_proba(first_logits))))
        if not difference <= _SERVED_TOLERANCE:
            requirement = f"give the calibrated probabilities within {_SERVED_TOLERANCE}"
            got, way_out = f"a difference of {difference:.2g}", "nothing was saved; please report this model"
            raise RuntimeError(expected("a pipeline with the saved model", requirement, got, way_out))
        return weights, difference

    def _served_scores(
        self, folder: Path, first: list[Any], pipeline: Callable[..., Any], **settings: Any
    ) -> NDArray[np.float64]:
        """(N, C) the scores that a pipeline with the saved model gives for the first rows, NaN where it gives none."""
        options, call_options = self.rows.serving(self.classifier, folder)
        classify = pipeline(
            self.rows.task,
            model=str(folder),
            device="cpu",
            trust_remote_code=self.trust_remote_code,
            **options,
            **settings,
        )
        results: Any = classify(first, **call_options)
        if isinstance(self.rows, LabelledTokens):  # tokens of each text, each with the score of its tag alone
            results = [
                [{"label": each["entity"], "score": each["score"]}] for text in results for each in text
            ]
        served = [{row["label"]: row["score"] for row in scores} for scores in results]
        return np.array(
            [[scores.get(name, np.nan) for name in self.classifier.class_names] for scores in served]
        )
