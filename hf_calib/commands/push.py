"""`hf-calib push`: a calibrated model's folder on the Hub, folded first where it is not."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_calib._errors import InputError, check, few
from hf_calib._files import REPORT
from hf_calib._hub import check_destination, with_owner
from hf_calib._records import read_json
from hf_calib._text import counted
from hf_calib.cards.card import usage_lines
from hf_calib.cards.facts import REPORT_FOLDER
from hf_calib.commands.console import Done
from hf_calib.commands.output import write_card_anew
from hf_calib.decisions import Decisions
from hf_calib.decisions.saved import DECISIONS, OUTDATED
from hf_calib.export.folder import (
    ADAPTER_CONFIG,
    CONFIG,
    copy_files,
    files_of,
    write_folded,
)
from hf_calib.export.heads import head_loses_bias
from hf_calib.export.hub import Changes, push_folder
from hf_calib.models.classifier import (
    CONFIG_KINDS,
    StoredWeights,
    load_trained,
    task_of,
)
from hf_calib.models.prompts import KEY as PROMPT
from hf_calib.models.weights import is_in_weights
from hf_calib.scaling import FOLDABLE_SCALERS
from hf_calib.scaling.saved_map import (
    MAP_NAME,
    SavedMap,
    check_in_weights,
    has_bias,
    load_map,
    method_of,
    recorded_in,
    title_of,
)

_REPORT = Path(REPORT_FOLDER, REPORT)

if TYPE_CHECKING:
    from hf_calib.commands.options import Push
    from hf_calib.commands.source import Running


@dataclass(frozen=True)
class _Found:
    """What a folder holds of a calibrated model."""

    path: Path
    config: Mapping[str, Any]
    # The calibrator next to the model and not in its weights.
    beside: SavedMap | None
    is_folded: bool

    @property
    def is_calibrated(self) -> bool:
        return self.is_folded or self.beside is not None


def run(options: Push, running: Running) -> Done:
    """Push a folder in one commit with its card; a calibrator next to a model is folded in,
    in a temporary folder.
    """
    # A wrong name or token is refused before a model is folded.
    check_destination(options.repo, options.revision)
    found = _look(options.folder)
    notes = _warned_of(found, options.no_fold)
    is_folded = found.is_folded
    # The last are those of the commit.
    announced: list[Changes] = []

    def announce(changes: Changes) -> None:
        announced.append(changes)
        for line in changes.lines():
            running.warn(line)

    with tempfile.TemporaryDirectory() as scratch:
        source = found.path
        if found.beside is not None:
            made = Path(scratch, found.path.resolve().name)
            why = "The calibrator is not in the weights"
            if not options.no_fold:
                running.stages(f"folding {title_of(found.beside.scaler)} into the head")
                why = _write_folded(found, made)
            is_folded = not why
            if is_folded:
                source = made
                notes += _on_left_rule(found.path, made)
            else:
                notes.append(
                    f"{why}. A plain transformers pipeline is not calibrated; hf_calib.pipeline is."
                )
        if found.is_calibrated:
            notes += write_card_anew(source, repo_id=with_owner(options.repo))
        running.stages(f"pushing to {options.repo}")
        what = "a calibrated model" if found.is_calibrated else "a model"
        commit: Any = push_folder(
            source,
            options.repo,
            # Without the option, the default of the owner decides.
            private=options.private or None,
            revision=options.revision,
            create_pr=options.create_pr,
            message=f"Push {what}",
            announce=announce,
        )
    changes = announced[-1]
    # A pull request has a branch of its own, from which its model can be loaded.
    revision = commit.pr_revision or options.revision
    needs_pipeline = found.is_calibrated and not is_folded
    usage = usage_lines(
        changes.repo_id,
        task_of(found.config),
        by_hf_calib=needs_pipeline or found.config.get(PROMPT) is not None,
        revision=revision,
        trust_remote_code="auto_map" in found.config,
    )
    # The Hub makes no empty commit, and returns the branch's latest one instead.
    is_new = commit.oid != changes.parent
    record = {
        **changes._asdict(),
        "revision": revision,
        "url": commit.commit_url,
        "pr_url": commit.pr_url,
        "folded": is_folded,
        "changed": is_new,
        "usage": usage,
    }
    files = counted(len(changes.uploaded), "file")
    there = changes.repo_id
    said = f"Pushed {files} to {there}"
    if not is_new:
        said = f"Nothing is new, so no commit was made: {there} has the same {files} already"
    where = f"Commit: {commit.commit_url}"
    if commit.pr_url is not None:
        where = f"Pull request: {commit.pr_url}"
    lines: list[Any] = [
        f"{said}: {', '.join(changes.uploaded)}",
        ["", where, "", *usage],
    ]
    return Done(lines, record, notes)


def _look(folder: Path) -> _Found:
    """Read what says whether a folder's model is calibrated,
    and refuse a calibrator of other weights.
    """
    has_config = (folder / CONFIG).is_file()
    config = read_json(folder / CONFIG, CONFIG_KINDS) if has_config else {}
    if (folder / _REPORT).is_file():
        # A damaged report is refused before anything is sent.
        read_json(folder / _REPORT, {})
    saved = load_map(folder) if (folder / MAP_NAME).is_file() else None
    folds = saved is None or method_of(saved.scaler) in FOLDABLE_SCALERS
    recorded = recorded_in(config)
    # A calibrator that does not fold may be next to weights with an earlier one.
    if recorded.get("folded") and folds:
        check_in_weights(saved, recorded, str(folder))
        weights = saved.about.get("fingerprint") if saved else None
        are_same = weights is None or StoredWeights(folder).have(weights)
        got = f"that of other weights in {folder}"
        way_out = "calibrate this model again, or remove calibration.json"
        check(are_same, "the calibrator to be that of the model", got, way_out)
        return _Found(folder, config, beside=None, is_folded=True)
    if saved is not None and _is_in_weights(folder, config, saved):
        return _Found(folder, config, beside=None, is_folded=True)
    return _Found(folder, config, beside=saved, is_folded=False)


def _on_left_rule(folder: Path, made: Path) -> list[str]:
    """A note where a rule is not pushed with the folded model."""
    is_left = (folder / DECISIONS).is_file() and not (made / DECISIONS).is_file()
    return [OUTDATED] if is_left else []


def _is_in_weights(folder: Path, config: Mapping[str, Any], saved: Any) -> bool:
    """Whether the weights have the calibrator, unless it takes adapters or foreign code to load
    them.
    """
    task = task_of(config)
    is_classifier = task is not None and task.classifier is not None
    is_foreign = "auto_map" in config or (folder / ADAPTER_CONFIG).is_file()
    if is_foreign or not is_classifier or "fingerprint" not in saved.about:
        return False
    model = load_trained(folder, task.auto_class)  # type: ignore[union-attr]
    return is_in_weights(saved, model, folder)


def _rule_of_served(folder: Path) -> Decisions | None:
    """The rule in a folder, if it is for the probabilities with the calibrator next to the model."""
    if not (folder / DECISIONS).is_file():
        return None
    try:
        found = Decisions.from_pretrained(folder)
    # The card says what is wrong with it.
    except InputError:
        return None
    return found if found.calibrator is not None else None


def _warned_of(found: _Found, no_fold: bool) -> list[str]:
    """Warnings that what is pushed is not calibrated, which is refused without no_fold."""
    folder = found.path
    if (folder / ADAPTER_CONFIG).is_file():
        way_out = "merge them (save_calibrated_model, or merge_and_unload and calibrate), or --no-fold"
        check(no_fold, f"{folder} to hold a whole model", "adapters", way_out)
        return [
            f"{folder} holds adapters. They are pushed without their base model, and not calibrated."
        ]
    way_out = (
        "calibrate it first (hf-calib calibrate), or push it unchanged with --no-fold"
    )
    requirement = f"{folder} to hold a calibrated model"
    # A folder without a model has no probabilities.
    is_calibrated = found.is_calibrated or not (folder / CONFIG).is_file()
    check(no_fold or is_calibrated, requirement, f"no {MAP_NAME}", way_out)
    if is_calibrated:
        return []
    return [f"{folder} holds no {MAP_NAME}. The pushed model is not calibrated."]


def _write_folded(found: _Found, target: Path) -> str:
    """Write a model with its calibrator folded in, and all other files to push;
    return why that cannot be, or "".
    """
    folder = found.path
    config = found.config
    saved: Any = found.beside
    title = title_of(saved.scaler)
    if method_of(saved.scaler) not in FOLDABLE_SCALERS:
        return f"{title} does not fold into the head"
    task = task_of(config)
    is_plain = "auto_map" not in config
    is_classifier = task is not None and task.classifier is not None
    requirement = f"{folder} to hold a classifier of sequences, tokens or images"
    got = few(config.get("architectures") or ["none"])
    if not is_plain:
        got = "code of its own"
    way_out = "save it with fold and save_pretrained in Python, or push it unchanged with --no-fold"
    check(is_plain and is_classifier, requirement, got, way_out)
    model = load_trained(folder, task.auto_class)  # type: ignore[union-attr]
    if has_bias(saved.scaler) and head_loses_bias(model, model.config.num_labels):
        return f"{title} has a bias, which the head does not keep"
    # A rule for the model with the calibrator next to it is written anew below.
    copy_files(files_of(folder).pushed, target, ("decisions*",))
    weights = write_folded(
        model,
        saved.scaler,
        target,
        batch=None,
        processing_class=None,
        about=saved.about,
    )
    rule = _rule_of_served(folder)
    own = None if rule is None else rule.fingerprint
    # The rule may be of weights that were trained since, if the calibrator's file names none.
    if rule is not None and (own is None or StoredWeights(folder).have(own)):
        replace(rule, fingerprint=weights, calibrator=None).save(target)
    # A report on the model with its calibrator next to it is also one on the model with it folded
    # in.
    path = target / _REPORT
    if path.is_file():
        report = read_json(path, {"about": dict})
        if report["about"].get("fingerprint") == saved.about.get("fingerprint"):
            report["about"]["fingerprint"] = weights
            path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return ""
