"""The rows that a model is run over: where they are from, and the options of a command that read them again."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from hf_calib._names import plain_name

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class LabelledRows:
    """What texts, tagged sentences and images share; each kind adds its columns, and how a model reads them.

    Args:
        data: a file, a folder or a dataset on the Hub.
        config_name: configuration of a Hub dataset.
        split: of a Hub dataset or folder.
    """

    data: str
    config_name: str | None = None
    split: str = "test"

    encoding: ClassVar[str]  # what a command says while it is done
    task: ClassVar[str]  # of a pipeline

    def load(self, argument: str = "data") -> Dataset:
        """The rows, with the columns as they are; errors name the argument."""
        from hf_calib.data.sources import load_rows

        return load_rows(self.data, config_name=self.config_name, split=self.split, argument=argument)

    def notes(self, inputs: Any) -> tuple[str, ...]:
        """What a report says of the inputs."""
        return () if inputs.note is None else (inputs.note,)

    def source(self) -> dict[str, str]:
        """The name of the data, without folders, and of the split where there are several."""
        return {"name": plain_name(self.data), **({} if self._is_file else {"split": self.split})}

    def options(self) -> list[str]:
        """Of `hf-calib evaluate`, to read the same rows in the same way; its own defaults are left out."""
        words = ["--data", self.source()["name"]]
        left_out = {"data", "batch_size", *(["split"] if self._is_file else [])}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in left_out and value != each.default:
                text = ",".join(value) if each.name == "class_names" else str(value)
                words += [f"--{each.name.replace('_', '-')}", text]
        return words

    @property
    def _is_file(self) -> bool:
        return os.path.isfile(self.data)
