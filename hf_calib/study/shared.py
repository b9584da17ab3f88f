"""A study in a place that several machines reach: object storage, or a dataset repository of the Hub."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hf_calib._errors import InputError, InputValueError, expected
from hf_calib._files import move_files, scratch_folder, whole_folder
from hf_calib.predictions.training import PREDICTIONS
from hf_calib.study.folder import (
    CELL,
    CELLS,
    LOG,
    MODELS,
    RESULTS,
    STUDY,
    is_finished,
    joined_cells,
    newest_checkpoint,
    read_plan,
    write_plan_file,
)

_REPORTED = (CELL, LOG, PREDICTIONS, RESULTS)  # in this order: who finds the last one finds all
_LAST_OF_CHECKPOINT = "trainer_state.json"  # as the Trainer writes it last
INPUTS = "inputs"


class SharedStudy:
    """The files of a study at an address, laid out as in its folder; of what is there, all of it is whole.

    Args:
        address: that fsspec knows, such as `s3://bucket/study` or `hf://datasets/me/study`; or a folder.

    Raises:
        ValueError: if there is no driver for it, or it holds a password.
    """

    def __init__(self, address: str) -> None:
        import fsspec

        if urlsplit(address).password:
            way_out = "keep credentials where the driver reads them, such as AWS_PROFILE"
            raise InputValueError(expected("--share", "be an address without a password", "one", way_out))
        self.address = address if "://" in address else os.path.abspath(address)
        with self._clear_errors():
            self._filesystem, root = fsspec.core.url_to_fs(self.address, use_listings_cache=False)
        self._root = root.rstrip("/")

    @property
    def repository(self) -> str | None:
        """The dataset repository of the Hub that it is in, as owner/name; or None."""
        match = re.match(r"hf://datasets/([^/@]+/[^/@]+)", self.address)
        return match[1] if match else None

    def fetch_plan(self, study: Path) -> bool:
        """Fetch the plan, and what the cells that it lists have finished; the study's own files stay.

        Args:
            study: the folder here, which gets the plan if it has none.

        Returns:
            Whether there is a plan.

        Raises:
            ValueError: if the place cannot be read, or holds no plan of a study.
        """
        plan = self._plan()
        if plan is None:
            return False
        there = self._below(CELLS)
        for name in plan["cells"]:
            folder = study / CELLS / name
            own = _of_folder(there, f"{CELLS}/{name}")
            if _has_results(own) and not is_finished(folder):
                self._fetch(f"{CELLS}/{name}", [file for file in _REPORTED if file in own], folder)
            elif CELL in own and not (folder / CELL).is_file():
                self._fetch(f"{CELLS}/{name}", [CELL], folder)
        if not (study / STUDY).is_file():
            self._fetch("", [STUDY], study)
        return True

    def send_plan(self, study: Path, *, models: bool) -> None:
        """Send the plan, and what is finished here and not there; both get the cells that the other has.

        Args:
            study: the folder here, after `fetch_plan`.
            models: see `send_finished`.

        Raises:
            ValueError: if the plan there is of another configuration, or the place cannot be written.
        """
        self._create_repository()
        own, there = read_plan(study), self._plan()
        if there is not None:
            if there["base"] != own["base"]:
                way_out = "name another place, or the arguments of that study"
                differing = sorted(
                    name
                    for name in {*there["base"], *own["base"]}
                    if there["base"].get(name) != own["base"].get(name)
                )
                got = f"that of another configuration, which differs in {', '.join(differing)}"
                raise InputValueError(expected("--share", f"hold this study: {self.address}", got, way_out))
            own["cells"] = joined_cells(study, there["cells"], own["cells"])
            write_plan_file(study, own)
        files = self._below("")
        cells = [f"{CELLS}/{name}/{CELL}" for name in own["cells"]]
        new = [path for path in cells if path not in files and (study / path).is_file()]
        if new or there is None or there["cells"] != own["cells"]:
            self._send(study, [*new, STUDY])
        self.send_finished([study / CELLS / name for name in own["cells"]], models=models)

    def send_finished(self, folders: Iterable[Path], *, models: bool) -> None:
        """Send the results of cells that are finished here and not there, in place of their checkpoints.

        Args:
            folders: of the cells.
            models: whether their calibrated models go with them.
        """
        there = self._below(CELLS)
        for folder in folders:
            place = f"{CELLS}/{folder.name}"
            own = _of_folder(there, place)
            if not is_finished(folder) or _has_results(own):
                continue
            of_models = _files_of(folder, MODELS) if models else []
            reported = [file for file in _REPORTED if (folder / file).is_file()]
            outdated = {f"{place}/{file.split('/')[0]}" for file in own if file.startswith("checkpoint-")}
            self._send(folder, [*of_models, *reported], place, outdated)

    def fetch_cell(self, folder: Path) -> None:
        """Fetch a cell's results, or its newest complete checkpoint if there is none as new here."""
        place = f"{CELLS}/{folder.name}"
        own = _of_folder(self._below(place), place)
        if _has_results(own):
            self._fetch(place, [file for file in _REPORTED if file in own], folder)
            return
        steps = [
            int(match[1])
            for file in own
            if (match := re.fullmatch(rf"checkpoint-(\d+)/{re.escape(_LAST_OF_CHECKPOINT)}", file))
        ]
        here = newest_checkpoint(folder)
        if steps and (here is None or max(steps) > int(here.rpartition("-")[2])):
            name = f"checkpoint-{max(steps)}"
            files = [file.split("/", 1)[1] for file in own if file.startswith(f"{name}/")]
            shutil.rmtree(folder / name, ignore_errors=True)  # cut short, or it would be the newest here
            self._fetch(f"{place}/{name}", files, folder / name)

    def send_checkpoint(self, checkpoint: Path) -> None:
        """Send a complete checkpoint of a cell, in place of older ones.

        Raises:
            OSError: if the training removes it meanwhile.
        """
        place = f"{CELLS}/{checkpoint.parent.name}"
        own = _of_folder(self._below(place), place)
        older = {file.split("/")[0] for file in own if file.startswith("checkpoint-")} - {checkpoint.name}
        with scratch_folder(checkpoint.parent) as scratch:
            # The training removes old checkpoints while this one is sent.
            kept = Path(shutil.copytree(checkpoint, scratch / checkpoint.name, copy_function=_link))
            files = sorted(_files_of(kept), key=lambda file: file == _LAST_OF_CHECKPOINT)
            self._send(kept, files, f"{place}/{checkpoint.name}", {f"{place}/{name}" for name in older})

    def send_inputs(self, paths: Mapping[str, Path]) -> None:
        """Send files and folders that trainings elsewhere read, by the names that they get there."""
        there = self._below(INPUTS)
        with tempfile.TemporaryDirectory() as scratch:
            for name, path in paths.items():
                target = Path(scratch) / name
                target.parent.mkdir(parents=True, exist_ok=True)
                if path.is_dir():
                    shutil.copytree(path, target, copy_function=_link)
                else:
                    _link(str(path.resolve()), str(target))
            files = [file for file in _files_of(Path(scratch)) if f"{INPUTS}/{file}" not in there]
            if files:
                self._send(Path(scratch), files, INPUTS)

    def fetch_inputs(self, target: Path) -> None:
        """Fetch what `send_inputs` has sent."""
        there = self._below(INPUTS)
        self._fetch(INPUTS, [file.removeprefix(f"{INPUTS}/") for file in there], target / INPUTS)

    def _plan(self) -> dict[str, Any] | None:
        with tempfile.TemporaryDirectory() as scratch:
            with self._clear_errors():
                if not self._filesystem.exists(self._at(STUDY)):
                    return None
                self._filesystem.get_file(self._at(STUDY), os.path.join(scratch, STUDY))
            return read_plan(Path(scratch))

    def _below(self, place: str) -> set[str]:
        """The files below a place, by their names from the study's on."""
        with self._clear_errors():
            self._filesystem.invalidate_cache()
            try:
                found = self._filesystem.find(self._at(place))
            except FileNotFoundError:
                found = []
        names = (path[len(self._root) :].lstrip("/") for path in found)
        # A store may hold any key, and a file would be fetched to outside of the study.
        return {name for name in names if ".." not in name.split("/")}

    def _fetch(self, place: str, files: Sequence[str], target: Path) -> None:
        """Put files into a folder, each whole and the last one last, or none of them."""
        order = {name: number for number, name in enumerate(files)}
        with whole_folder(
            target, merge=partial(move_files, order=lambda path: order.get(path.name, -1))
        ) as made:
            for file in files:
                path = made / file
                path.parent.mkdir(parents=True, exist_ok=True)
                with self._clear_errors():
                    self._filesystem.get_file(self._at(f"{place}/{file}" if place else file), str(path))

    def _send(
        self, folder: Path, files: Sequence[str], place: str = "", outdated: Iterable[str] = ()
    ) -> None:
        """Send files in this order, or as one commit; then remove what they replace."""
        places = {file: f"{place}/{file}" if place else file for file in files}
        with self._clear_errors():
            if self.repository is not None:
                self._commit({places[file]: folder / file for file in files}, outdated)
                return
            is_local = "file" in self._filesystem.protocol
            for file in files:
                target = self._at(places[file])
                if is_local:  # others would make a bucket of a mistyped name
                    os.makedirs(os.path.dirname(target), exist_ok=True)
                # Stores show a file when all of it is there.
                unfinished = f"{target}.unfinished" if is_local else target
                self._filesystem.put_file(str(folder / file), unfinished)
                if is_local:
                    os.replace(unfinished, target)
            for old in outdated:
                self._filesystem.rm(self._at(old), recursive=True)

    def _commit(self, files: Mapping[str, Path], outdated: Iterable[str]) -> None:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        inside = self._filesystem.resolve_path(self._root).path_in_repo
        base = f"{inside}/" if inside else ""
        self._hub().create_commit(
            self.repository,
            [
                *(CommitOperationAdd(base + name, str(path)) for name, path in files.items()),
                *(CommitOperationDelete(f"{base}{name}/", is_folder=True) for name in outdated),
            ],
            commit_message=f"{next(iter(files)).rpartition('/')[0] or STUDY}: {len(files)} files",
            repo_type="dataset",
        )

    def _create_repository(self) -> None:
        if self.repository is not None:
            with self._clear_errors():
                self._hub().create_repo(self.repository, repo_type="dataset", private=True, exist_ok=True)

    def _hub(self) -> Any:
        from huggingface_hub import HfApi

        return HfApi(endpoint=self._filesystem.endpoint, token=self._filesystem.token)

    def _at(self, place: str) -> str:
        return f"{self._root}/{place}" if place else self._root

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        """Name the address where a driver fails, whatever it raises: no credentials, no such bucket, no network."""
        try:
            yield
        except InputError:
            raise
        except Exception as error:
            words = " ".join(str(error).split())[:300] or type(error).__name__
            way_out = "check the address and the credentials, and install what it needs, such as s3fs"
            requirement = "be a place where a study can be read and written"
            raise InputValueError(expected(self.address, requirement, words, way_out)) from error


def _of_folder(files: Iterable[str], place: str) -> set[str]:
    return {file[len(place) + 1 :] for file in files if file.startswith(f"{place}/")}


def _has_results(files: set[str]) -> bool:
    return {RESULTS, PREDICTIONS} <= files


def _files_of(folder: Path, names: Sequence[str] = ("",)) -> list[str]:
    found = (path for name in names for path in (folder / name).rglob("*") if path.is_file())
    return sorted(path.relative_to(folder).as_posix() for path in found)


def _link(path: str, target: str) -> None:
    """A second name for a file, which stays when the first one goes; where that cannot be, a copy."""
    try:
        os.link(path, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(path, target)
