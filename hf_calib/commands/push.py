"""`hf-calib push`: a calibrated model's folder on the Hub, folded first where it is not."""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import CommitInfo
from transformers import CONFIG_MAPPING, AutoConfig

from hf_calib._errors import InputValueError, expected, few
from hf_calib._files import whole_folder
from hf_calib._hub import check_destination, with_owner
from hf_calib.cards import write_card
from hf_calib.cards.card import usage_lines
from hf_calib.cards.facts import REPORT_FOLDER
from hf_calib.commands.opening import Stages, ignore_stage
from hf_calib.decisions.saved import FILE as DECISIONS
from hf_calib.export.heads import head_loses_bias
from hf_calib.export.hub import CONFIG, Changes, files_to_push, is_weights, log_changes, push_folder
from hf_calib.export.saving import standalone_copy, write_folded
from hf_calib.models.loading import load_trained
from hf_calib.models.prompts import KEY as PROMPT
from hf_calib.models.tasks import task_of
from hf_calib.predictions.kinds import TOKENS
from hf_calib.scaling.methods import FOLDABLE_SCALERS
from hf_calib.scaling.saved_map import MAP_NAME, SavedMap, has_bias, load_map, map_title, recorded_in

if TYPE_CHECKING:
    from hf_calib.commands.options import Push


@dataclass(frozen=True)
class Pushed:
    """The outcome of `push`.

    Args:
        repo_id: the repository, with its owner.
        revision: the branch or the pull request's; None is main.
        url: of the commit.
        pr_url: of the pull request, if one was opened.
        uploaded: paths in the repository.
        removed: weights that would have been loaded in place of the uploaded ones.
        left_out: pickles.
        folded: whether the map is in the uploaded weights.
        notes: warnings.
        usage: lines of Python.
    """

    repo_id: str
    revision: str | None
    url: str
    pr_url: str | None
    uploaded: tuple[str, ...]
    removed: tuple[str, ...]
    left_out: tuple[str, ...]
    folded: bool
    notes: tuple[str, ...]
    usage: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything, of JSON's own types."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()
        }


def push(
    options: Push, announce: Callable[[Changes], None] = log_changes, stages: Stages = ignore_stage
) -> Pushed:
    """Push a model's folder to the Hub in one commit, with its card.

    A folded model is pushed as it is, with a README.md that is written or updated in its folder. One that is not,
    beside a calibration.json (the output folder of a training), is folded first, in a temporary folder. A map that
    does not fold is pushed beside the model. `announce` is called with what will be uploaded and removed.

    Raises:
        ValueError: if the folder holds no calibrated model, or adapters that are not merged, unless no_fold; if the
            Hub refuses the push.
        OSError: if a file cannot be read or written, or the Hub cannot be reached.
    """
    folder, repo_id, no_fold = options.folder, options.repo, options.no_fold
    revision, private, create_pr = options.revision, options.private, options.create_pr
    check_destination(repo_id, revision)
    config = _read_json(folder / CONFIG)
    record = _read_json(folder / MAP_NAME)
    folded = bool(recorded_in(config).get("folded"))
    saved = load_map(folder) if record and not folded else None
    loses_bias = _loses_bias(config, saved)
    notes = _notes(folder, record, folded=folded, no_fold=no_fold, loses_bias=loses_bias)
    is_foldable = record.get("method") in FOLDABLE_SCALERS and not loses_bias
    with ExitStack() as stack:
        source = folder
        if saved is not None and is_foldable and not no_fold:
            stages(f"folding {map_title(record['method'])} into the head")
            source = Path(stack.enter_context(tempfile.TemporaryDirectory())) / folder.resolve().name
            _write_folded(folder, source, config, saved)
            folded = True
            if (folder / DECISIONS).is_file():
                notes.append(
                    f"{DECISIONS} is not pushed: its rule was fitted on the probabilities from before the map. Fit it "
                    "again with hf-calib decide, on the pushed model."
                )
        if folded or record:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", UserWarning)
                write_card(source, repo_id=with_owner(repo_id))
            notes += [str(warning.message) for warning in caught]
        announced: list[Changes] = []

        def remember(changes: Changes) -> None:
            announced.append(changes)
            announce(changes)

        stages(f"pushing to {repo_id}")
        commit = push_folder(
            source,
            repo_id,
            private=private or None,
            revision=revision,
            create_pr=create_pr,
            message="Push a calibrated model" if folded or record else "Push a model",
            announce=remember,
        )
    assert isinstance(commit, CommitInfo)
    changes = announced[-1]
    revision = commit.pr_revision or revision
    uses_ours = (saved is not None and not folded) or config.get(PROMPT) is not None
    return Pushed(
        changes.repo_id,
        revision,
        commit.commit_url,
        commit.pr_url,
        changes.added,
        changes.removed,
        changes.left_out,
        folded,
        tuple(notes),
        tuple(
            usage_lines(
                changes.repo_id,
                task_of(config),
                by_hf_calib=uses_ours,
                revision=revision,
                trust_remote_code="auto_map" in config,
            )
        ),
    )


def _notes(
    folder: Path, record: dict[str, Any], *, folded: bool, no_fold: bool, loses_bias: bool
) -> list[str]:
    """Warnings that the pushed weights are not calibrated; without no_fold, a folder that holds no map is refused."""
    notes = []
    if (folder / "adapter_config.json").is_file():
        if not no_fold:
            way_out = (
                "merge them (save_calibrated_model, or merge_and_unload and hf-calib calibrate), or --no-fold"
            )
            raise InputValueError(expected(str(folder), "hold a whole model", "adapters", way_out))
        notes.append(
            f"{folder} holds adapters. They are pushed without their base model, and not calibrated."
        )
    elif not (folded or record):
        if not no_fold and (folder / CONFIG).is_file():
            way_out = "calibrate it first (hf-calib calibrate), or push it as it is with --no-fold"
            raise InputValueError(expected(str(folder), "hold a calibrated model", f"no {MAP_NAME}", way_out))
        notes.append(f"{folder} holds no {MAP_NAME}. The pushed model is not calibrated.")
    if record and not folded:
        method = str(record.get("method"))
        if method not in FOLDABLE_SCALERS or loses_bias:
            why = "has a bias, which the head does not keep" if loses_bias else "does not fold into the head"
            notes.append(
                f"{map_title(method)} {why}. A plain transformers pipeline is not calibrated; "
                "hf_calib.pipeline is."
            )
        elif no_fold:
            notes.append(
                f"The map in {MAP_NAME} is not in the weights. A plain transformers pipeline is not calibrated; "
                "hf_calib.pipeline is. Push without --no-fold to fold it in."
            )
    return notes


def _loses_bias(config: dict[str, Any], saved: SavedMap | None) -> bool:
    """Whether the model's head, made of its config, keeps no bias, and the map beside it has one."""
    task = task_of(config)
    if saved is None or not has_bias(saved.scaler) or config.get("model_type") not in CONFIG_MAPPING:
        return False
    if task is None or task.labels is TOKENS or "auto_map" in config:
        return False
    kind = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = task.auto_class.from_config(kind)
    return head_loses_bias(model, kind.num_labels)


def _write_folded(folder: Path, target: Path, config: dict[str, Any], saved: SavedMap) -> None:
    """A new folder with the model of the first one, its map folded in, and all else that is pushed of it."""
    task = task_of(config)
    if task is None or task.classifier is None or "auto_map" in config:
        got = "code of its own" if "auto_map" in config else few(config.get("architectures") or ["none"])
        way_out = "save it with fold and save_pretrained in Python, or push it as it lies with --no-fold"
        requirement = "hold a classifier of sequences, tokens or images"
        raise InputValueError(expected(str(folder), requirement, got, way_out))
    model = load_trained(folder, task.auto_class)
    with whole_folder(target) as made:
        write_folded(
            standalone_copy(model), saved.scaler, made, batch=None, processing_class=None, about=saved.about
        )
        for name, path in files_to_push(folder).items():
            new = made / name
            is_rule = name.split("/")[0] in (DECISIONS, "decisions")
            if not (new.exists() or is_weights(name) or is_rule):
                new.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, new)
        # A report on the model with its map beside it is one on the model with it folded in.
        path = made / REPORT_FOLDER / "report.json"
        report, before, after = map(_read_json, (path, folder / MAP_NAME, made / MAP_NAME))
        about = report.get("about")
        if isinstance(about, dict) and about.get("fingerprint") == before.get("fingerprint"):
            about["fingerprint"] = after["fingerprint"]
            path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    """An object from a file; empty where there is none."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        way_out = "save it again"
        raise InputValueError(expected(str(path), "be readable JSON", f"{error}", way_out)) from error
    return found if isinstance(found, dict) else {}
