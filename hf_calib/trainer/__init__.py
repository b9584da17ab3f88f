"""The Hugging Face Trainer with a calibration loss, its arguments and its callbacks.

What the mixins override of `Trainer`, or read of its private names, why, and the test that fails when upstream changes
it (tests/trainer; `test_overrides.py` compares the table with the code, on the oldest and the newest transformers):

    | name | why | test |
    | --- | --- | --- |
    | `compute_loss` | the calibration loss, without the model computing its own | test_loss_scaling.py |
    | `get_batch_samples` | the normalizer of the global batch; rows that accelerate repeats | test_loss_scaling.py |
    | `loss_is_scaled_for_ga` | tells the Trainer not to divide by the accumulation steps again | test_loss_scaling.py |
    | `train` | data and checkpoint are checked first; arguments that have changed | test_training_again.py |
    | `evaluate` | a fit before it, nested evaluations, which dataset it was | test_evaluation.py |
    | `evaluation_loop` | the calibration sums of the pass, by `preprocess_logits_for_metrics` | test_evaluation.py |
    | `_get_eval_sampler` | rows stay in order with group_by_length | test_evaluation.py |
    | `add_callback` | one callback of a kind, in the order in which they need each other | test_callbacks.py |
    | `hyperparameter_search` | by a metric's name, the NLL by default | test_hyperparameter_search.py |
    | `save_model` | the gammas and the map beside the model | test_calibration_map.py |
    | `_push_from_checkpoint` | no token in what is uploaded | test_training_args.py |
    | `push_to_hub` | the calibrated model in one commit | ../export/test_hub.py |
    | `_finish_current_push` | a push of the training's own reads the same folder | ../export/test_hub.py |
    | `create_model_card` | the section on calibration | ../cards/test_card.py |
    | `_get_collator_with_removed_columns` | labels as a batch will have them | test_roles.py |
    | `_signature_columns` | the columns that the model takes | test_roles.py |
    | `_set_signature_columns_if_needed` | the same | test_roles.py |
"""

from hf_calib.trainer.callbacks import AdaFocalCallback, CalibrationMapCallback, TemperatureScalingCallback
from hf_calib.trainer.config import CalibrationConfig, CalibrationTrainingArguments
from hf_calib.trainer.mixin import CalibrationMixin
from hf_calib.trainer.trainer import CalibrationTrainer

__all__ = [
    "AdaFocalCallback",
    "CalibrationConfig",
    "CalibrationMapCallback",
    "CalibrationMixin",
    "CalibrationTrainer",
    "CalibrationTrainingArguments",
    "TemperatureScalingCallback",
]
