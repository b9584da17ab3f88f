"""`hf-calib push`: a calibrated model's folder on the Hub, folded first where it is not."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_calib._errors import check, few
from hf_calib._hub import check_destination, with_owner
from hf_calib.cards import write_card
from hf_calib.cards.card import usage_lines
from hf_calib.cards.facts import REPORT_FOLDER
from hf_calib.commands import console
from hf_calib.commands.console import Done
from hf_calib.decisions.saved import FILE as DECISIONS
from hf_calib.decisions.saved import OUTDATED
from hf_calib.export.folder import ADAPTER_CONFIG, CONFIG, copy_files, files_of, standalone_copy, write_folded
from hf_calib.export.heads import head_loses_bias
from hf_calib.export.hub import Changes, push_folder
from hf_calib.models.classifier import load_trained, task_of
from hf_calib.models.prompts import KEY as PROMPT
from hf_calib.scaling import FOLDABLE_SCALERS
from hf_calib.scaling.saved_map import MAP_NAME, has_bias, load_map, method_of, recorded_in, title_of

if TYPE_CHECKING:
    from hf_calib.commands.options import Push
    from hf_calib.commands.source import Running


def run(options: Push, running: Running) -> Done:
    """Push a folder in one commit with its card; a model beside its map is folded in a temporary folder first."""
    folder, repo = options.folder, options.repo
    check_destination(repo, options.revision)
    has_config = (folder / CONFIG).is_file()
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8")) if has_config else {}
    folded = bool(recorded_in(config).get("folded"))
    saved = load_map(folder) if (folder / MAP_NAME).is_file() and not folded else None
    is_calibrated = folded or saved is not None
    notes = _warned_of(folder, is_calibrated or not has_config, options.no_fold)
    announced: list[Changes] = []  # the last are those of the commit

    def announce(changes: Changes) -> None:
        announced.append(changes)
        console.print_warnings(changes.lines())

    with tempfile.TemporaryDirectory() as scratch:
        source = folder
        if saved is not None:
            made = Path(scratch, folder.resolve().name)
            why = f"The map in {MAP_NAME} is not in the weights"
            if not options.no_fold:
                running.stages(f"folding {title_of(saved.scaler)} into the head")
                why = _write_folded(folder, made, config, saved)
            folded, source = (False, folder) if why else (True, made)
            if why:
                notes.append(f"{why}. A plain transformers pipeline is not calibrated; hf_calib.pipeline is.")
            elif (folder / DECISIONS).is_file():
                notes.append(OUTDATED)
        if is_calibrated:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", UserWarning)
                write_card(source, repo_id=with_owner(repo))
            notes += [str(warning.message) for warning in caught]
        running.stages(f"pushing to {repo}")
        commit: Any = push_folder(
            source,
            repo,
            private=options.private or None,
            revision=options.revision,
            create_pr=options.create_pr,
            message="Push a calibrated model" if is_calibrated else "Push a model",
            announce=announce,
        )
    changes, revision = announced[-1], commit.pr_revision or options.revision
    name, uploaded = changes.repo_id, changes.added
    how: Any = {"revision": revision, "trust_remote_code": "auto_map" in config}
    is_ours = (is_calibrated and not folded) or config.get(PROMPT) is not None
    usage = usage_lines(name, task_of(config), by_hf_calib=is_ours, **how)
    record = {"repo_id": name, "revision": revision, "url": commit.commit_url, "pr_url": commit.pr_url}
    record |= {"uploaded": uploaded, "removed": changes.removed, "left_out": changes.left_out}
    record |= {"folded": folded, "usage": usage}
    pushed = "Pushed" if commit.pr_url is None else "Opened a pull request"
    lines = [f"Uploaded {len(uploaded)} files to {name}: {', '.join(uploaded)}", ""]
    return Done([*lines, f"{pushed}: {commit.pr_url or commit.commit_url}", "", *usage], record, notes)


def show(done: Done) -> None:
    """What was uploaded, where the commit is, and how to use the model; what is to be copied is not wrapped."""
    console.show(done.lines[0])
    print(*done.lines[1:], sep="\n")


def _warned_of(folder: Path, is_calibrated: bool, no_fold: bool) -> list[str]:
    """Warnings that what is pushed is not calibrated, which is refused without no_fold."""
    if (folder / ADAPTER_CONFIG).is_file():
        way_out = "merge them (save_calibrated_model, or merge_and_unload and calibrate), or --no-fold"
        check(no_fold, f"{folder} to hold a whole model", "adapters", way_out)
        return [f"{folder} holds adapters. They are pushed without their base model, and not calibrated."]
    way_out = "calibrate it first (hf-calib calibrate), or push it as it is with --no-fold"
    check(no_fold or is_calibrated, f"{folder} to hold a calibrated model", f"no {MAP_NAME}", way_out)
    return [] if is_calibrated else [f"{folder} holds no {MAP_NAME}. The pushed model is not calibrated."]


def _write_folded(folder: Path, target: Path, config: Mapping[str, Any], saved: Any) -> str:
    """Write a model with its map folded in, and all else that is pushed of it; return why that cannot be, or ""."""
    title = title_of(saved.scaler)
    if method_of(saved.scaler) not in FOLDABLE_SCALERS:
        return f"{title} does not fold into the head"
    task = task_of(config)
    got = "code of its own" if "auto_map" in config else few(config.get("architectures") or ["none"])
    requirement = f"{folder} to hold a classifier of sequences, tokens or images"
    way_out = "save it with fold and save_pretrained in Python, or push it as it lies with --no-fold"
    is_ours = task is not None and task.classifier is not None and "auto_map" not in config
    check(is_ours, requirement, got, way_out)
    model = load_trained(folder, task.auto_class)  # type: ignore[union-attr]
    if has_bias(saved.scaler) and head_loses_bias(model, model.config.num_labels):
        return f"{title} has a bias, which the head does not keep"
    copy_files(files_of(folder).pushed, target, ("decisions*",))
    weights = write_folded(
        standalone_copy(model), saved.scaler, target, batch=None, processing_class=None, about=saved.about
    )
    # A report on the model with its map beside it is one on the model with it folded in.
    path = target / REPORT_FOLDER / "report.json"
    if path.is_file():
        report = json.loads(path.read_text(encoding="utf-8"))
        if report["about"].get("fingerprint") == saved.about.get("fingerprint"):
            report["about"]["fingerprint"] = weights
            path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return ""
