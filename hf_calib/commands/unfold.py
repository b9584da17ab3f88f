"""`hf-calib unfold`: the model as it was before a scaler was folded into its head, in a new folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from hf_calib._errors import InputValueError, expected
from hf_calib._files import check_output, whole_folder
from hf_calib.commands.opening import Stages, ignore_stage
from hf_calib.models.tasks import task_of
from hf_calib.scaling.saved_map import MAP_NAME, load_map, save_map

# Weights of any form, exports, and what is about the calibrated model. Tokenizers and processors have many files of
# many names: all others are copied.
_LEFT_OUT = {
    "config.json",
    MAP_NAME,
    "decisions.json",
    "README.md",
    "training_args.bin",
    "trainer_state.json",
}
_WEIGHTS = (
    *(".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".h5", ".msgpack", ".pt", ".pth"),
    *(".pkl", ".ckpt", ".onnx", ".onnx_data", ".pt2", ".gguf", ".ot"),
)


class UnfoldedModel(NamedTuple):
    """Whether calibration.json lies beside the model, with the map that is no longer in its weights."""

    map_kept: bool


def unfold_model(
    source: str, output: Path, trust_remote_code: bool = False, stages: Stages = ignore_stage
) -> UnfoldedModel:
    """Write a folded model as it was before the fold, with its tokenizer or processor.

    Its calibration.json says that the map is not folded in; folding that map again gives the folded weights.
    The report, the model card and decisions.json, which are about the calibrated model, are left out.

    Args:
        source: a classifier of texts, tokens or images on the Hub or in a folder.
        output: a folder; in an existing one, files are replaced, and other weights and another map removed.
        trust_remote_code: whether code that comes with the model may run.
        stages: called with the name of each stage as it begins.

    Raises:
        ValueError: if the model cannot be loaded, or `unfold` refuses it; if output is the model's folder.
        OSError: if output cannot be written; it is as it was then.
    """
    from hf_calib.export.hub import LOSS_STATE_NAME, PUSHED_LOSS_STATE
    from hf_calib.export.saving import check_overwrites_no_original, replace_model
    from hf_calib.export.unfold import unfold

    check_output(output)
    check_overwrites_no_original(output, [source])
    stages(f"loading {source}")
    folder, model = _load(source, trust_remote_code)
    unfold(model)
    map_kept = (folder / MAP_NAME).is_file()
    stages(f"saving to {output}")
    with whole_folder(output, replace_model) as made:
        model.save_pretrained(made)
        if map_kept:
            saved = load_map(folder)
            about = {key: value for key, value in saved.about.items() if key not in ("head", "fingerprint")}
            save_map(saved.scaler, made / MAP_NAME, {**about, "folded": False})
        for name in (PUSHED_LOSS_STATE, LOSS_STATE_NAME):  # the gammas, to train on with
            if (folder / name).is_file():
                shutil.copyfile(folder / name, made / LOSS_STATE_NAME)
        for path in folder.iterdir():
            if path.is_file() and not (
                path.name in _LEFT_OUT or path.name.startswith((".", "_")) or path.name.endswith(_WEIGHTS)
            ):
                shutil.copyfile(path, made / path.name)
    return UnfoldedModel(map_kept)


def _load(source: str, trust_remote_code: bool) -> tuple[Path, Any]:
    """The folder that a model is in, downloaded if need be, and the model of the class that it was saved as."""
    import transformers
    from huggingface_hub import snapshot_download

    way_out = "name a classifier on the Hub or in a folder; check that its files are complete"
    try:
        if os.path.isdir(source):
            folder = Path(source)
        else:
            formats = [f"*{form}" for form in _WEIGHTS if not form.startswith(".safetensors")]
            folder = Path(snapshot_download(source, ignore_patterns=formats))
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        task = task_of(config.to_dict())
        architecture = (config.architectures or [""])[0]
        if task is None or not task.architecture.endswith("Classification"):
            raise ValueError(f"a {architecture or 'model without architecture'} is not a classifier")
        # In the class that it was saved as: the Auto class makes DeiT without its teacher.
        kind = None if getattr(config, "auto_map", None) else getattr(transformers, architecture, None)
        options = {} if kind is not None else {"trust_remote_code": trust_remote_code}
        model = (kind or task.auto_class).from_pretrained(folder, dtype="auto", **options)
    except Exception as error:  # what broken or missing files raise, and code that is not trusted
        cause = " ".join(str(error).split())
        raise InputValueError(expected("the model", "be loadable", f"{source} ({cause})", way_out)) from error
    return folder, model
