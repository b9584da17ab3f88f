"""Names of models and data in reports and cards."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from hf_calib._errors import InputValueError, expected


def is_hub_name(name: object) -> bool:
    """Whether it can be the name of a model or dataset on the Hub, and is not a folder here.

    >>> [is_hub_name(name) for name in ("bert-base-uncased", "me/x", "/home/me/x", "../x", "a/b/c", "me/x.csv")]
    [True, True, False, False, False, False]
    """
    if not isinstance(name, str) or not re.fullmatch(r"(\w[\w.-]{0,95}/)?\w[\w.-]{0,95}", name, re.ASCII):
        return False
    ends = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".gz", ".txt", ".npz")
    return not name.endswith(ends) and ".." not in name and "--" not in name and not os.path.exists(name)


def plain_name(name: str) -> str:
    r"""A dataset's or a model's name without the folders of this machine.

    >>> plain_name("/home/me/data/test.csv"), plain_name("fancyzhx/ag_news"), plain_name("C:\\data\\test.csv")
    ('test.csv', 'fancyzhx/ag_news', 'test.csv')
    """
    if is_hub_name(name):
        return name
    parts = [part for part in re.split(r"[\\/]+", name) if part not in ("", ".", "..")]
    return parts[-1] if parts else ""


def short_names(sources: Sequence[str]) -> list[str]:
    """Names of several data: of paths the last two parts, or as many as make them differ; all else as it is.

    Raises:
        ValueError: if one is given twice.

    >>> short_names(["clinc150", "gaussian_noise"])
    ['clinc150', 'gaussian_noise']
    """
    paths = {source: Path(source).parts for source in sources if os.path.exists(source)}
    names: list[str] = []
    for n_parts in range(2, max([2, *map(len, paths.values())]) + 1):
        names = ["/".join(paths[s][-n_parts:]) if s in paths else s for s in sources]
        if len(set(names)) == len(names):
            return names
    twice = next(name for name in names if names.count(name) > 1)
    raise InputValueError(
        expected("ood_data", "be different data", f"{twice} twice", "leave one of them out")
    )
