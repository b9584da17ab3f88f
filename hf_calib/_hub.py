"""Commits to the Hub: all files in one commit or none, and failures as messages for the user."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    errors,
    get_token,
)
from huggingface_hub.utils import validate_repo_id

from hf_calib._errors import (
    InputError,
    InputOSError,
    InputValueError,
    check,
    expected,
    printable,
)

logger = logging.getLogger(__name__)

CARD = "README.md"

# The former is 20 times faster.
_YAML: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# Results of a model are at level 7.
_DEEPEST = 20
# Seconds before a push is tried again.
_PAUSES = (1, 2, 4, 8)
# The Hub's answers if another commit has come first.
_OTHERS_WERE_FASTER = {409, 412}
# None is no answer at all, for example if the connection was cut.
_MAY_PASS = {None, 429, 500, 502, 503, 504}
_TOKENS = "https://huggingface.co/settings/tokens"
_NEW_TOKEN = (
    f"make one with write access at {_TOKENS}, and run `hf auth login` or set HF_TOKEN"
)
_LATER = "push again later: uploaded files are not sent again, and a commit appears completely or not at all"
_REFUSALS: dict[int | None, tuple[str, str]] = {
    401: ("the token to be valid", _NEW_TOKEN),
    403: (
        "the token to have write access",
        "use another one, or open a pull request (create_pr)",
    ),
    404: (
        "a model's repository",
        "check its name (no dataset's); create it before a pull request",
    ),
}
_Result = TypeVar("_Result")


def read_card(path: Path, *, is_ours: bool = True) -> Any:
    """Read a model card; raise ValueError if its metadata cannot be read,
    or are built to take memory.

    In the card of another model, results of another form do not matter.
    """
    try:
        # Notepad writes a byte-order mark.
        text = path.read_text(encoding="utf-8-sig")
        _check_metadata(text)
        return ModelCard(text, ignore_metadata_errors=not is_ours)
    except OSError:
        raise
    # YAML and the checks of the metadata raise different errors.
    except Exception as error:
        got = f"{path} ({printable(error)[:300]})"
        way_out = "correct the lines between the two ---, or move the file away for a new card"
        raise InputValueError(
            expected(CARD, "have metadata that can be read", got, way_out)
        ) from error


def _check_metadata(text: str) -> None:
    """Raise for aliases, with which a few lines can stand for millions,
    and for lists within many others.
    """
    found = re.match(r"\s*---\s*\n(.*?)\n---", text, re.DOTALL)
    depth = 0
    for event in yaml.parse("" if found is None else found[1], _YAML):
        way_out = "write it out"
        is_plain = not isinstance(event, yaml.AliasEvent)
        check(is_plain, "metadata without references", "an alias (*)", way_out)
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        check(depth <= _DEEPEST, "metadata of few levels", "deeper ones", way_out)


class Destination(NamedTuple):
    """Where a commit goes; its fields are arguments of `hf_calib.export.push_folder`."""

    repo_id: str
    token: str | None = None
    private: bool | None = None
    revision: str | None = None
    create_pr: bool = False


def push_files(
    files: Mapping[str, Path],
    to: Destination,
    *,
    message: str,
    in_the_way: Callable[[Iterable[str]], tuple[str, ...]] = lambda there: (),
    announce: Callable[
        [str, tuple[str, ...], str | None], object
    ] = lambda repo_id, removed, parent: None,
    run_as_future: bool = False,
) -> CommitInfo | Future[CommitInfo]:
    """Upload files, by path in the repository, in one commit, which also removes conflicting files,
    as announced.
    """
    secret = check_destination(to.repo_id, to.revision, to.token)
    repo_id, revision, create_pr = (
        with_owner(to.repo_id, to.token),
        to.revision,
        to.create_pr,
    )
    api = HfApi(token=secret)
    announced: list[tuple[tuple[str, ...], str | None]] = []

    def attempt() -> CommitInfo:
        if not create_pr:
            api.create_repo(repo_id, private=to.private, exist_ok=True)
            # References such as refs/pr/1 are made by the Hub only.
            if revision not in (None, "main") and not revision.startswith("refs/"):
                api.create_branch(repo_id, branch=revision, exist_ok=True)
        head = api.model_info(repo_id, revision=revision)
        removed = in_the_way([each.rfilename for each in head.siblings or ()])
        if (removed, head.sha) not in announced:
            announce(repo_id, removed, head.sha)
            announced.append((removed, head.sha))
        added = [CommitOperationAdd(name, path) for name, path in files.items()]
        return api.create_commit(
            repo_id,
            added + [CommitOperationDelete(name) for name in removed],
            commit_message=message,
            revision=revision,
            # The push fails if somebody else has pushed since then.
            parent_commit=head.sha,
            create_pr=create_pr,
        )

    def push() -> CommitInfo:
        # If the response to a pull request was lost, it may have been opened.
        passing = _OTHERS_WERE_FASTER | ({429} if create_pr else _MAY_PASS)
        for pause in _PAUSES:
            try:
                return attempt()
            except (errors.HTTPError, json.JSONDecodeError) as error:
                if _status(error) not in passing:
                    raise
            logger.warning(
                "The Hub did not accept the push. Trying again in %d s.", pause
            )
            time.sleep(pause)
        return attempt()

    if run_as_future:
        return api.run_as_future(_in_sentences, push, repo_id, secret)
    return _in_sentences(push, repo_id, secret)


def check_destination(
    repo_id: str, revision: str | None, token: str | None = None
) -> str:
    """Raise for an invalid name, branch or token; return the token."""
    try:
        validate_repo_id(repo_id)
    except ValueError:
        way_out = "name a model on the Hub as owner/name, without an address or a type before it"
        raise InputValueError(
            expected("the repository", "be owner/name", repr(repo_id), way_out)
        ) from None
    is_branch = (
        revision is None or re.fullmatch(r"[^\s~^:?*\[\\]+", revision) is not None
    )
    check(
        is_branch,
        "revision to be the name of a branch",
        repr(revision),
        "leave it out for main",
    )
    try:
        found = (token or get_token() or "").strip()
    except errors.OIDCError as error:
        got = f"none ({error})"
        raise InputValueError(
            expected("the token", "be given", got, _NEW_TOKEN)
        ) from None
    check(found != "", "a token to be given for the push", "none", _NEW_TOKEN)
    # Other tokens cannot be sent in a header, and the error would quote them.
    is_plain = re.fullmatch(r"[!-~]+", found) is not None
    check(
        is_plain,
        "the token to be of plain letters and digits",
        "one with others",
        _NEW_TOKEN,
    )
    return found


def with_owner(repo_id: str, token: str | None = None) -> str:
    """The repository's name with its owner, by default the token's."""
    secret = check_destination(repo_id, None, token)
    if "/" in repo_id:
        return repo_id
    return f"{_in_sentences(HfApi(token=secret).whoami, repo_id, secret)['name']}/{repo_id}"


def _status(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _in_sentences(request: Callable[[], _Result], repo_id: str, token: str) -> _Result:
    """The result of a request; its errors become messages for the user, without the token."""
    try:
        return request()
    except Exception as error:
        failed = _explained(error, repo_id, token)
    # This is outside of the except block, so that the first error, which may quote the token,
    # is not its context.
    raise failed


def _explained(error: Exception, repo_id: str, token: str) -> Exception:
    expects_it = isinstance(
        error, (errors.HTTPError, OSError, RuntimeError, json.JSONDecodeError)
    )
    is_bad_card = isinstance(error, ValueError) and CARD in str(error)
    if isinstance(error, InputError) or not (expects_it or is_bad_card):
        return error
    status = _status(error)
    text = str(getattr(error, "server_message", None) or error).replace(token, "***")
    got = f"{status or type(error).__name__} for {repo_id} ({' '.join(text.split())[:300]})"
    if is_bad_card or status not in _MAY_PASS | _OTHERS_WERE_FASTER:
        requirement, way_out = _REFUSALS.get(
            status, ("the push to be accepted", "change what it names")
        )
        return InputValueError(f"expected {requirement}, got {got}; {way_out}")
    return InputOSError(f"expected the push to arrive, got {got}; {_LATER}")
