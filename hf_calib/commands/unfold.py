"""`hf-calib unfold`: the model as it was before a scaler was folded into its head, in a new folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from huggingface_hub import snapshot_download

from hf_calib._errors import InputError
from hf_calib._files import REPORT_FORMS, check_output, whole_folder
from hf_calib.commands.console import Done
from hf_calib.commands.output import earlier_results, on_removed, refresh_card
from hf_calib.export.folder import (
    LOSS_STATE_NAME,
    PUSHED_LOSS_STATE,
    check_overwrites_no_original,
    copy_files,
    replace_model,
)
from hf_calib.export.unfold import unfold
from hf_calib.models.classifier import find_task, refusals
from hf_calib.models.weights import fingerprint
from hf_calib.scaling import FOLDABLE_SCALERS
from hf_calib.scaling.saved_map import (
    MAP_NAME,
    SavedMap,
    check_in_weights,
    load_map,
    method_of,
    recorded_in,
    save_map,
)

if TYPE_CHECKING:
    from hf_calib.commands.options import Unfold
    from hf_calib.commands.source import Running

# A fold is saved as safetensors; weights in other formats may be of another state.
_OTHER_WEIGHTS = [
    "*.bin*",
    "*.h5",
    "*.msgpack",
    "*.pt*",
    "*.pkl",
    "*.ckpt",
    "*.onnx*",
    "*.gguf",
    "*.ot",
]
# Neither the model nor what is about the calibrated one is copied.
# Tokenizers have files of many names.
_ABOUT_IT = [
    "config.json",
    "trainer_state.json",
    "decisions.json",
    "README.md",
    *REPORT_FORMS,
    MAP_NAME,
]
_LEFT_OUT = [*_OTHER_WEIGHTS, *_ABOUT_IT, ".*", "_*"]


def run(options: Unfold, running: Running) -> Done:
    """Write a folded model as it was before the fold, with its tokenizer or processor;
    folding again undoes that.
    """
    source = options.source
    output = options.output
    trusted = options.trust_remote_code
    check_output(output)
    check_overwrites_no_original(output, [source])
    running.stages(f"loading {source}")
    way_out = (
        "name a classifier on the Hub or in a folder; check that its files are complete"
    )
    with refusals("the model", "be loadable", source, way_out):
        folder = Path(source)
        if not folder.is_dir():
            folder = Path(snapshot_download(source, ignore_patterns=_OTHER_WEIGHTS))
        config = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=trusted
        )
        # In the class that it was saved as: the Auto class makes DeiT without its teacher.
        kind = find_task(folder, trust_remote_code=trusted).auto_class
        if not hasattr(config, "auto_map") and config.architectures:
            kind = getattr(transformers, config.architectures[0], kind)
        model = kind.from_pretrained(folder, dtype="auto", trust_remote_code=trusted)
    # A calibrator's file names the weights with the fold, so they are hashed before it
    # is undone.
    weights = fingerprint(model)
    unfold(model)
    running.stages(f"saving to {output}")
    files = {
        path.name: path
        for path in folder.iterdir()
        if path.is_file() and ".safetensors" not in path.name
    }
    # The gammas of an adaptive loss, with which training can be resumed.
    for name in (LOSS_STATE_NAME, PUSHED_LOSS_STATE):
        if (folder / name).is_file():
            files[LOSS_STATE_NAME] = folder / name
    saved = load_map(folder) if MAP_NAME in files else None
    # Another head is refused; other layers may have been trained since the fold.
    are_same = saved is None or saved.about.get("fingerprint", weights) == weights
    map_kept = saved is not None and are_same and _was_folded(saved, config)
    earlier = earlier_results(output)
    with whole_folder(output, replace_model) as made:
        model.save_pretrained(made)
        if saved is not None and map_kept:
            scaler, about = saved
            # It names the layers of the fold.
            about.pop("head", None)
            of_weights = {"folded": False, "fingerprint": fingerprint(model)}
            save_map(scaler, made, {**about, **of_weights})
        copy_files(files, made, _LEFT_OUT)
    lines = ["The weights are those from before the fold, bit for bit."]
    if not are_same:
        lines = [
            "The head is that from before the fold, bit for bit. Other weights have changed since, "
            f"for which the calibrator in {MAP_NAME} was not fitted. It is left out."
        ]
    elif saved is not None and not map_kept:
        lines.append(
            f"The calibrator in {MAP_NAME} is not the one of the fold, and is left out."
        )
    record = {"map_kept": map_kept, "output": str(output)}
    notes = [*on_removed(output, earlier), *refresh_card(output)]
    return Done(lines, record, notes)


def _was_folded(saved: SavedMap, config: Any) -> bool:
    """Whether a calibrator is that of the weights; another one was fitted to them,
    and is not one of the unfolded.
    """
    if method_of(saved.scaler) not in FOLDABLE_SCALERS:
        return False
    try:
        check_in_weights(saved, recorded_in(config), "it")
    except InputError:
        return False
    return True
