"""Commits to the Hub: all of the files in one of them, or nothing, with failures told in sentences."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, errors, get_token
from huggingface_hub.utils import get_session, hf_raise_for_status, parse_ratelimit_headers, validate_repo_id

from hf_calib._errors import InputError, InputOSError, InputValueError, expected, few

logger = logging.getLogger(__name__)

CARD = "README.md"

_PAUSES = (1.0, 2.0, 4.0)  # seconds before a request is made again
_LONGEST_PAUSE = 300.0  # the Hub counts requests in windows of five minutes
_ROUNDS = 5  # of a push, while others push to the same branch
_PASSING = {408, 429, 500, 502, 503, 504}
_TOKENS = "https://huggingface.co/settings/tokens"
_NEW_TOKEN = f"make one with write access at {_TOKENS}, and run `hf auth login` or set HF_TOKEN"

_Result = TypeVar("_Result")


def _nothing(*_: object) -> tuple[str, ...]:
    return ()


def push_files(
    files: Mapping[str, Path],
    repo_id: str,
    *,
    token: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    message: str,
    in_the_way: Callable[[Iterable[str]], tuple[str, ...]] = _nothing,
    announce: Callable[[str, tuple[str, ...]], object] = _nothing,
    run_as_future: bool = False,
) -> CommitInfo | Future[CommitInfo]:
    """Upload files to a model's repository in one commit, which may remove others.

    Whoever loads the repository meanwhile, or after a push that failed, gets it as it was before. Pushing again
    completes it.

    Args:
        files: what to upload, by their paths in the repository.
        repo_id: "owner/name", or "name" for the owner of the token. A new repository is made where there is none.
        token: with write access; None takes HF_TOKEN or that of `hf auth login`. It is never logged or saved.
        private: whether a new repository is private; None is the owner's default.
        revision: the branch, which is made from main where there is none; None is main.
        create_pr: whether to open a pull request instead of changing the branch.
        message: the commit's first line.
        in_the_way: of the paths in the repository, those that are removed in the same commit.
        announce: called with the repository and what will be removed, before the commit, and again if others have
            changed the repository meanwhile.
        run_as_future: whether to upload in the background, once names and token have been checked.

    Returns:
        The commit, or a future of it. `pr_url` is that of the pull request.

    Raises:
        ValueError: if the names or the token are wrong, or the Hub refuses them.
        OSError: if a file cannot be read, or the Hub cannot be reached after several attempts.

    Notes:
        Requests that huggingface_hub makes once only (of the repository, the branch and the commit) are repeated
        after 1, 2 and 4 seconds where the Hub is busy, fails or cannot be reached, or after what its Retry-After
        says. Those that upload files are repeated by huggingface_hub.
    """
    secret = check_destination(repo_id, revision, token)
    repo_id = with_owner(repo_id, token)
    api = HfApi(token=secret)

    def push() -> CommitInfo:
        failed: Exception
        remains: list[str] = []
        try:
            return _push(
                api,
                files,
                repo_id,
                private,
                revision,
                create_pr,
                message,
                in_the_way,
                announce,
                remains=remains,
            )
        except Exception as error:
            failed = error
        # Outside of the except block, so that it does not carry the first error: its text may quote the token.
        raise _explained(failed, repo_id, secret, remains)

    return api.run_as_future(push) if run_as_future else push()


def check_destination(repo_id: str, revision: str | None, token: str | None = None) -> str:
    """Raise for names and a token that cannot be; return the token.

    Raises:
        ValueError: then, or where there is no token.
    """
    way_out = "name a model on the Hub as owner/name, without an address or a type before it"
    try:
        validate_repo_id(repo_id)
    except ValueError:
        raise InputValueError(expected("the repository", "be owner/name", repr(repo_id), way_out)) from None
    if revision is not None and not re.fullmatch(r"[^\s~^:?*\[\\]+", revision):
        raise InputValueError(
            expected("revision", "be the name of a branch", repr(revision), "None or no --revision is main")
        )
    try:
        found = (token or get_token() or "").strip()
    except errors.OIDCError as error:
        raise InputValueError(expected("the token", "be given", f"none ({error})", _NEW_TOKEN)) from None
    if not found:
        raise InputValueError(expected("a token", "be given for the push", "none", _NEW_TOKEN))
    if not re.fullmatch(r"[!-~]+", found):  # it cannot stand in a header, and the error there would quote it
        got = "one with spaces, line breaks or letters with accents"
        raise InputValueError(expected("the token", "be of plain letters and digits", got, _NEW_TOKEN))
    return found


def with_owner(repo_id: str, token: str | None = None) -> str:
    """The repository's name with its owner, who is that of the token where none is named.

    Raises:
        ValueError: if the name or the token are wrong.
        OSError: if the Hub cannot be reached.
    """
    secret = check_destination(repo_id, None, token)
    if "/" in repo_id:
        return repo_id
    failed: Exception
    try:
        return f"{_again(HfApi(token=secret).whoami)['name']}/{repo_id}"
    except Exception as error:
        failed = error
    # Outside of the except block, as in `push_files`.
    raise _explained(failed, repo_id, secret, [])


def _push(
    api: HfApi,
    files: Mapping[str, Path],
    repo_id: str,
    private: bool | None,
    revision: str | None,
    create_pr: bool,
    message: str,
    in_the_way: Callable[[Iterable[str]], tuple[str, ...]],
    announce: Callable[[str, tuple[str, ...]], object],
    *,
    remains: list[str],
) -> CommitInfo:
    """Make what is missing, and commit; a branch that was made for it goes again if that fails.

    Args:
        remains: takes what has been made and is left, for the message of a failure.
    """
    there = _find(api, repo_id, None)
    has_branch = there is not None and (revision is None or _find(api, repo_id, revision) is not None)
    if create_pr and not has_branch:
        missing = repo_id if there is None else f"the branch {revision}"
        way_out = "push without a pull request, which makes it"
        raise InputValueError(
            expected(missing, "be there for a pull request", "nothing of that name", way_out)
        )
    if not has_branch and CARD in files:  # before anything is made
        _again(partial(_check_card, api, files[CARD].read_text(encoding="utf-8")))
    if there is None:
        try:
            _make(lambda: api.create_repo(repo_id, private=private))
        except errors.HTTPError as error:
            if _is_lost(error):
                remains.append(f"perhaps the new repository {repo_id}")
            raise
        remains.append(f"the new repository {repo_id}")
        there = _find(api, repo_id, None)
        if there is None:  # the name was taken
            got = "a dataset, a space or something else of that name"
            raise InputValueError(expected(repo_id, "be a model repository", got, "choose another name"))
        has_branch = revision in (None, "main")
    if has_branch:
        return _commit(api, files, repo_id, revision, create_pr, message, in_the_way, announce)
    start, branch = there.sha, str(revision)
    try:
        _make(lambda: api.create_branch(repo_id, branch=branch, revision=start))
        return _commit(api, files, repo_id, revision, create_pr, message, in_the_way, announce)
    except BaseException:
        try:
            now = _find(api, repo_id, branch)
            if now is not None and now.sha == start:  # nobody else has used it
                _again(lambda: api.delete_branch(repo_id, branch=branch))
        except Exception:
            remains.append(f"perhaps the new branch {branch}")
        raise


def _check_card(api: HfApi, card: str) -> None:
    """Raise for metadata that the Hub would refuse in a commit."""
    # Not by ModelCard.validate: before huggingface_hub 2 it asks huggingface.co, wherever the endpoint is.
    content = {"repoType": "model", "content": card}
    response = get_session().post(f"{api.endpoint}/api/validate-yaml", json=content)
    if response.status_code == 400:
        found = [str(each.get("message")) for each in response.json().get("errors", [])]
        raise InputValueError(_bad_card(few(found)))
    hf_raise_for_status(response)


def _make(request: Callable[[], object]) -> None:
    """Make a repository or a branch, unless there is one by now."""
    try:
        _again(request)
    except errors.HfHubHTTPError as error:
        if error.response.status_code != 409:
            raise


def _commit(
    api: HfApi,
    files: Mapping[str, Path],
    repo_id: str,
    revision: str | None,
    create_pr: bool,
    message: str,
    in_the_way: Callable[[Iterable[str]], tuple[str, ...]],
    announce: Callable[[str, tuple[str, ...]], object],
) -> CommitInfo:
    """Commit on top of what the repository holds; where others were faster, on top of what it holds then."""

    def commit_on(head: Any, removed: tuple[str, ...]) -> CommitInfo:
        # New operations each time: they remember what the repository held when they were first sent.
        return api.create_commit(
            repo_id,
            [
                *(CommitOperationAdd(name, path) for name, path in files.items()),
                *(CommitOperationDelete(name) for name in removed),
            ],
            commit_message=message,
            revision=revision,
            parent_commit=head.sha,
            create_pr=create_pr,
        )

    announced: tuple[str, ...] | None = None
    for left in reversed(range(_ROUNDS)):
        head = _find(api, repo_id, revision)
        if head is None:
            got = "none: it was removed meanwhile"
            raise InputValueError(expected(repo_id, "be there", got, "push again"))
        removed = in_the_way(each.rfilename for each in head.siblings or ())
        if removed != announced:
            announce(repo_id, removed)
            announced = removed
        try:
            return _again(partial(commit_on, head, removed), may_repeat_commit=not create_pr)
        except errors.HfHubHTTPError as error:
            others_were_faster = error.response.status_code in (409, 412)
            if not left or not others_were_faster:
                raise
    raise AssertionError("unreachable")


def _find(api: HfApi, repo_id: str, revision: str | None) -> Any:
    """Commit and files at the head of a branch, as the Hub gives them; None without such a repository."""
    try:
        return _again(lambda: api.model_info(repo_id, revision=revision))
    except (errors.GatedRepoError, errors.DisabledRepoError):
        raise
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        if error.response.status_code != 404:  # 401: a token that is not valid
            raise
        return None


# ---- Failures ----


def _again(request: Callable[[], _Result], *, may_repeat_commit: bool = True) -> _Result:
    """Make a request, a few times where it fails for reasons that may pass."""
    for pause in _PAUSES:
        try:
            return request()
        except (errors.HTTPError, json.JSONDecodeError) as error:
            status = _status(error)
            path = _path(error)
            # The others, of the upload itself, have been repeated by huggingface_hub.
            ours = not path or (path.startswith("/api/") and "/preupload/" not in path)
            # One whose answer was lost may have opened its pull request.
            safe = may_repeat_commit or (path and "/commit/" not in path) or status == 429
            pause = _asked_pause(error) or pause
            if not (ours and safe and status in {None, *_PASSING} and pause <= _LONGEST_PAUSE):
                raise
            reason = f"answered {status}" if status else "cannot be reached"
            logger.warning("The Hub %s. Trying again in %.0f s.", reason, pause)
        time.sleep(pause)
    return request()


def _status(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _is_lost(error: BaseException) -> bool:
    """Whether the Hub may have done what it was asked for, although the request failed."""
    status = _status(error)
    return status is None or status >= 500


def _path(error: BaseException) -> str:
    """Of the request that failed; "" where that is not known."""
    try:
        return str(error.request.url.path)  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return ""


def _asked_pause(error: BaseException) -> float | None:
    """The seconds that the Hub asks to wait."""
    headers = getattr(getattr(error, "response", None), "headers", {})
    limit = parse_ratelimit_headers(headers) if _status(error) == 429 else None
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    asked = str(headers.get("Retry-After", "")).strip()
    return float(asked) if asked.isdecimal() else None


def _explained(error: Exception, repo_id: str, token: str, remains: list[str]) -> Exception:
    """The error for the user, without the token; the same error where a push does not expect it."""
    if isinstance(error, InputError):
        return error
    if isinstance(error, ValueError) and CARD in str(error):
        return InputValueError(_bad_card(error))
    cause: BaseException = error
    while cause.__cause__ is not None and not isinstance(cause, (errors.HTTPError, OSError)):
        cause = cause.__cause__  # of the threads that upload
    status = _status(cause)

    def said(text: object) -> str:
        return few([" ".join(str(text).replace(token, "***").split())])

    answer = said(getattr(cause, "server_message", None) or (f"error {status}" if status else cause))
    left = f"; left there: {' and '.join(remains)}" if remains else ""
    if isinstance(cause, json.JSONDecodeError) or (_is_lost(cause) and "/commit/" in _path(cause)):
        left += "; the push may have arrived, and if so as a whole"
    elif not remains:
        left = "; the repository is as it was"

    def told(kind: type[InputError], what: str, requirement: str, got: str, way_out: str) -> InputError:
        return kind(expected(what, requirement, got, f"{way_out}{left}"))

    if isinstance(cause, errors.OfflineModeIsEnabled):
        return told(InputOSError, "the Hub", "be reachable", "offline mode", "unset HF_HUB_OFFLINE")
    if status == 401:
        is_old = "expired" in answer.lower()
        got = f"one that {'has expired' if is_old else 'the Hub does not know'} ({answer})"
        return told(InputValueError, "the token", "be valid", got, _NEW_TOKEN)
    if status == 403:
        way_out = (
            "use a token that may write there, name another repository, or open a pull request (create_pr)"
        )
        return told(
            InputValueError, "the token", f"have write access to {repo_id}", f"403 ({answer})", way_out
        )
    if isinstance(cause, (errors.GatedRepoError, errors.DisabledRepoError)):
        way_out = "ask its owners for access, or name another repository"
        return told(InputValueError, repo_id, "be open to this token", answer, way_out)
    if status == 404:
        way_out = "check the name of the repository and what the token may do"
        return told(InputValueError, repo_id, "be there", f"404 ({answer})", way_out)
    if status in (409, 412):
        got = f"others' commits while this one was made, {_ROUNDS} times"
        return told(InputOSError, repo_id, "stay as it is during the push", got, "push again")
    if status == 429:
        wait = _asked_pause(cause)
        way_out = f"push again in {wait:.0f} s" if wait else "push again in some minutes"
        return told(
            InputOSError, "the Hub", "accept the requests", f"429, too many of them ({answer})", way_out
        )
    if status is not None and status >= 500:
        way_out = "push again later; see https://status.huggingface.co"
        return told(InputOSError, "the Hub", "work", f"{status} each time ({answer})", way_out)
    if status is not None:
        return told(
            InputValueError, "the push", "be accepted", f"{status} ({answer})", "change what it names"
        )
    if isinstance(cause, (errors.HTTPError, json.JSONDecodeError)):
        got = f"{type(cause).__name__} ({answer})"
        return told(InputOSError, "the Hub", "be reachable", got, "check the network, then push again")
    if isinstance(cause, OSError) and cause.filename is not None:
        return told(InputOSError, said(cause.filename), "be readable", said(cause.strerror), "push again")
    if isinstance(error, (OSError, RuntimeError)):  # of hf_xet, or of the threads that upload
        return told(InputOSError, "the files", "be uploaded", said(cause), "push again")
    return error


def _bad_card(reason: object) -> str:
    got = " ".join(str(reason).split())
    return expected(CARD, "have metadata that the Hub takes", got, "correct its first lines")
