"""A push is one commit or nothing, whatever fails: against a real server, on the loopback interface."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch

from hf_calib._errors import InputOSError, InputValueError
from hf_calib.export import push_folder, save_folded
from hf_calib.export.folder import files_of
from hf_calib.export.hub import Changes
from hf_calib.scaling import TemperatureScaling
from tests.helpers.hub_server import TOKEN, Fault, Hub
from tests.helpers.tiny import tiny_bert, tokenizer

REPO = "me/model"
Snapshot = dict[str, bytes]


def contents(folder: Path) -> Snapshot:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibrated model with decisions, a report, a card and a gamma table."""
    folder = tmp_path_factory.mktemp("model")
    scaler = TemperatureScaling(grid=[2.5]).fit([[1.0, 0.0]] * 3, [0, 0, 1])
    save_folded(tiny_bert(), scaler, folder, batch=None, processing_class=tokenizer())
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Card\n")
    (folder / "decisions.json").write_text("{}")
    (folder / "calibration" / "figures").mkdir()
    (folder / "calibration" / "report.json").write_text("{}")
    (folder / "calibration" / "figures" / "reliability.png").write_bytes(b"\x89PNG")
    (folder / "calibration_loss.safetensors").write_bytes(b"gammas")
    return folder


PUSHED = {
    *(
        "README.md",
        "calibration.json",
        "calibration/figures/reliability.png",
        "calibration/loss.safetensors",
    ),
    "calibration/head.safetensors",
    *("calibration/report.json", "config.json", "decisions.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json"),
}


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made between requests, without making them."""
    made: list[float] = []
    monkeypatch.setattr(time, "sleep", made.append)
    return made


OLD = {
    *(
        "pytorch_model.bin",
        "adapter_config.json",
        "adapter_model.safetensors",
        "model.fp16.safetensors",
    ),
    *(
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "calibration_loss.safetensors",
    ),
}
KEPT = dict.fromkeys(
    ("notes.txt", "tf_model.h5", "onnx/model.onnx", "old/pytorch_model.bin"), b"kept"
)


def with_old_weights(hub: Hub) -> dict[str, bytes]:
    """A repository with a model of another form, and with files that are nobody's weights."""
    hub.files[REPO] = {
        "main": dict.fromkeys({*OLD, "README.md", "config.json"}, b"old") | KEPT
    }
    return dict(hub.files[REPO]["main"])


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    """A copy of the model, to be changed."""
    shutil.copytree(model, tmp_path / "model")
    return tmp_path / "model"


# ---- What arrives ----


def test_a_new_repository_holds_the_folder(model: Path, hub: Hub) -> None:
    commit = push_folder(model, "model", private=True, message="First")
    files = hub.files[REPO]["main"]
    local = contents(model)
    local["calibration/loss.safetensors"] = local.pop("calibration_loss.safetensors")
    assert files == {".gitattributes": b"", **local}
    assert files.keys() == PUSHED | {".gitattributes"}
    assert hub.created[0]["visibility"] == "private"
    assert commit.commit_url == f"{hub.address}/{REPO}/commit/{hub.head(REPO, 'main')}"
    assert push_folder(model, REPO).oid == commit.oid  # nothing is new
    assert hub.commits[REPO, "main"] == ["First"]


@pytest.mark.parametrize("revision", [None, "calibrated"])
def test_one_commit_replaces_the_old_weights_and_keeps_the_rest(
    revision: str | None, model: Path, hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    """A branch is made from main, which stays as it was."""
    before, announced = with_old_weights(hub), list[Changes]()
    push_folder(model, REPO, revision=revision, announce=announced.append)
    files = hub.files[REPO][revision or "main"]
    assert files.keys() == PUSHED | KEPT.keys()
    assert {name: files[name] for name in KEPT} == KEPT
    assert len(hub.commits[REPO, revision or "main"]) == 1
    (changes,) = announced
    assert set(changes.uploaded) == PUSHED
    assert set(changes.removed) == OLD
    if revision is not None:
        assert hub.files[REPO]["main"] == before
    with_old_weights(hub)
    push_folder(model, REPO)
    assert (
        "adapter_config.json, adapter_model.safetensors, calibration_loss.safetensors, model"
        in caplog.text
    )
    assert (
        "would be loaded in place of the pushed weights, and will be removed"
        in caplog.text
    )


def test_a_pull_request_leaves_the_branch_as_it_was(model: Path, hub: Hub) -> None:
    before = with_old_weights(hub)
    commit = push_folder(model, REPO, create_pr=True)
    assert (commit.pr_revision, commit.pr_url) == (
        "refs/pr/1",
        f"{hub.address}/{REPO}/discussions/1",
    )
    assert hub.files[REPO]["main"] == before
    assert hub.files[REPO]["refs/pr/1"].keys() == PUSHED | KEPT.keys()
    push_folder(model, REPO, revision="refs/pr/1", message="More")
    assert hub.files[REPO].keys() == {"main", "refs/pr/1"}
    message = r"a model's repository, got 404 for me.*before a pull request"
    for repo_id, revision in (("me/other", None), (REPO, "absent")):
        with pytest.raises(InputValueError, match=message):
            push_folder(model, repo_id, revision=revision, create_pr=True)
    assert hub.files.keys() == {REPO}


# ---- What is never sent ----


def test_pickles_links_checkpoints_and_hidden_files_stay(
    folder: Path, tmp_path: Path, hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("training_args.bin", "optimizer.pt", "state.data"):
        torch.save({}, folder / name)
    (folder / "table.txt").write_bytes(pickle.dumps({}))
    hidden = (
        "checkpoint-2/model.safetensors",
        "_made/a.txt",
        "code/__pycache__/a.pyc",
        ".env",
    )
    # Those of the root only are a training's.
    inside = {"inside/labels.txt", "inside/_made/a.txt", "inside/checkpoint-2/a.txt"}
    for name in (*hidden, *inside, "old.bin", "OLDER.BIN"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("secret")
    (folder / "empty.txt").touch()
    with zipfile.ZipFile(folder / "texts.zip", "w") as archive:
        archive.writestr("a.txt", "a")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "labels.txt").write_text("a b")
    links = {
        "labels.txt": outside / "labels.txt",
        "linked": outside,
        "inside/round": folder,
    }
    for name, to in links.items():
        (folder / name).symlink_to(to)
    (folder / "copy.txt").symlink_to(folder / "inside/labels.txt")
    push_folder(folder, REPO)
    extra = {*inside, "texts.zip", "empty.txt", "copy.txt", ".gitattributes"}
    assert hub.files[REPO]["main"].keys() == PUSHED | extra
    assert hub.files[REPO]["main"]["copy.txt"] == b"secret"
    assert (
        "inside/round, labels.txt, linked: links, which will not be pushed"
        in caplog.text
    )
    assert caplog.text.count("can run code when loaded") == 1
    assert "old.bin, state.data, table.txt can run code" in caplog.text


def break_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(
        (folder / "model.safetensors").read_bytes()[:-1]
    )


def only_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def shard_missing(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-1-of-2.safetensors")
    index = {
        "weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


WHOLE = "to hold a whole model, got a file that cannot be read"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (
        lambda f: (f / "config.json").unlink(),
        "to hold config.json, got none",
    ),
    "only a pickle": (
        only_a_pickle,
        "to hold safetensors weights, got no model.safetensors",
    ),
    "cut weights": (break_weights, WHOLE),
    "shard missing": (shard_missing, "got no model-2-of-2.safetensors"),
    "bad card": (
        lambda f: (f / "README.md").write_text("---\n a: [\n---\n"),
        "README.md to have metadata that can be read",
    ),
    "link to nothing": (
        lambda f: (f / "a.txt").symlink_to(f / "b"),
        "be a file, got a link to nothing; remove",
    ),
    "a queue": (
        lambda f: os.mkfifo(f / "q"),
        "to be a file, got neither a file nor a folder; remove",
    ),
    "no folder": (shutil.rmtree, "which does not exist"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_folder_without_a_whole_model_is_refused_before_anything_is_sent(
    name: str, folder: Path, hub: Hub
) -> None:
    spoil, message = BROKEN[name]
    spoil(folder)
    with pytest.raises(InputValueError, match=message):
        push_folder(folder, REPO)
    assert hub.requests == []


def test_names_and_tokens_are_checked_before_anything_is_sent(
    model: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in (
        "datasets/me/model",
        "https://huggingface.co/me/model",
        "me/mo del",
        "",
        "./model",
    ):
        with pytest.raises(
            InputValueError, match="expected the repository to be owner/name, got"
        ):
            push_folder(model, name)
    with pytest.raises(
        InputValueError, match="expected revision to be the name of a branch"
    ):
        push_folder(model, REPO, revision="a b")
    with pytest.raises(
        InputValueError, match="expected the token to be of plain letters"
    ) as error:
        push_folder(model, REPO, token=f"{TOKEN}\nx")
    assert_secret(error.value, "")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(
        huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token")
    )
    monkeypatch.setattr(
        huggingface_hub.constants, "HF_STORED_TOKENS_PATH", str(tmp_path / "tokens")
    )
    with pytest.raises(
        InputValueError,
        match=r"expected a token to be given for the push, got none; .*hf auth login",
    ):
        push_folder(model, REPO)
    with monkeypatch.context() as of_a_pipeline:  # It has no identity to show.
        of_a_pipeline.setenv("HF_OIDC_RESOURCE", REPO)
        with pytest.raises(InputValueError, match="expected the token to be given"):
            push_folder(model, REPO)
    assert hub.requests == []
    push_folder(model, REPO, token=f" {TOKEN}\n")  # as it is read from a file
    assert {token for _, path, token in hub.requests if "yaml" not in path} == {
        f"Bearer {TOKEN}"
    }


def test_a_card_that_the_hub_refuses(folder: Path, hub: Hub) -> None:
    (folder / "README.md").write_text("---\nrefused: true\n---\n")
    before = with_old_weights(hub)
    with pytest.raises(
        InputValueError,
        match=r"to be accepted, got .*README.md.*refused is not allowed",
    ):
        push_folder(folder, REPO)
    assert hub.files[REPO] == {"main": before}


# ---- What the Hub refuses ----


def assert_secret(error: BaseException, logged: str) -> None:
    """The token is in no message, also not in those of the errors that led to it."""
    seen: BaseException | None = error
    while seen is not None:
        assert TOKEN not in repr(seen)
        seen = seen.__cause__ or seen.__context__
    assert TOKEN not in logged


ARRIVES = "expected the push to arrive, got "
REFUSALS: dict[str, tuple[Fault, type[Exception], str]] = {
    "wrong token": (
        Fault(401, "Invalid credentials in Authorization header"),
        InputValueError,
        r"expected the token to be valid, got 401 for me/model \(Invalid credentials.*\); make one with write access at"
        r" https://huggingface.co/settings/tokens, and run `hf auth login` or set HF_TOKEN",
    ),
    "echo": (
        Fault(401, f'{{"error": "you came with Bearer {TOKEN}"}}'),
        InputValueError,
        r"with Bearer \*\*\*",
    ),
    "read only": (
        Fault(403, "no"),
        InputValueError,
        r"the token to have write access, got 403 .* \(no\); use another one, or open a pull request",
    ),
    "too many": (
        Fault(429, "slow down"),
        InputOSError,
        r"got 429 for me/model \(slow down\); push again",
    ),
    "cut": (Fault(), InputOSError, ARRIVES + "RemoteProtocolError .* push again later"),
}


@pytest.mark.parametrize(
    "stage", ["/api/models/me/model", "/revision/new", "/preupload/", "/commit/"]
)
@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_say_what_to_do_and_leave_everything_as_it_was(
    name: str, stage: str, model: Path, hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    fault, kind, message = REFUSALS[name]
    before, local = with_old_weights(hub), contents(model)

    def at_stage(number: int, method: str, path: str) -> Fault | None:
        return fault if stage in path else None

    hub.fault = at_stage
    with pytest.raises(kind, match=message) as error:
        push_folder(model, REPO, revision="new" if stage == "/revision/new" else None)
    assert_secret(error.value, caplog.text)
    assert all(files == before for files in hub.files[REPO].values())
    assert contents(model) == local
    hub.fault = lambda *_: None
    push_folder(model, REPO)
    assert hub.files[REPO]["main"].keys() == PUSHED | KEPT.keys()


def test_a_repository_of_another_type_and_no_network(
    model: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.taken = {"me/data"}
    with pytest.raises(
        InputValueError,
        match=r"a model's repository, got 404 for me/data .*check its name",
    ):
        push_folder(model, "me/data")
    assert hub.files == {}
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        InputOSError, match=ARRIVES + "OfflineModeIsEnabled.*HF_HUB_OFFLINE"
    ):
        push_folder(model, REPO)


# ---- What passes ----


@pytest.mark.parametrize("fault", [Fault(429), Fault()])
def test_a_push_is_tried_again_after_a_pause(
    fault: Fault, model: Path, hub: Hub, pauses: list[float]
) -> None:
    seen: set[str] = set()

    def once(number: int, method: str, path: str) -> Fault | None:
        if "/preupload/" in path or path in seen:
            return None
        seen.add(path)
        return fault

    hub.fault = once
    push_folder(model, REPO)
    assert hub.files[REPO]["main"].keys() == PUSHED | {".gitattributes"}
    assert len(seen) == 4  # the repository, its creation, the card, the commit
    assert pauses == [1, 2, 4, 8]


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.slow
def test_the_connection_is_cut_at_each_request_in_turn(
    is_new: bool, is_done: bool, model: Path, hub: Hub
) -> None:
    """From there on for good, and once: before the request is done, or before its answer arrives."""
    local = contents(model)
    complete: dict[str, bytes] | None = None
    for at in range(100):
        for for_good in (True, False):
            hub.files, hub.commits, start = {}, {}, len(hub.requests)
            before = {} if is_new else with_old_weights(hub)

            def fault(number: int, method: str, path: str) -> Fault | None:
                n = number - start  # noqa: B023
                return (
                    Fault(is_done=is_done) if n == at or (for_good and n > at) else None  # noqa: B023
                )

            hub.fault = fault
            told = ""
            try:
                push_folder(model, REPO, revision="new")
            except InputOSError as error:
                told = str(error)
            n_requests = len(hub.requests) - start
            now = hub.files.get(REPO, {})
            new = now.get("new")
            hub.fault = lambda *_: None
            assert now.get("main", {}) in (
                [{}, {".gitattributes": b""}] if is_new else [before]
            )
            assert contents(model) == local
            if n_requests <= at:  # the push was over before
                assert complete is not None
                assert new == complete
                assert not told
                assert at >= 6
                return
            if for_good:
                assert "expected the push to arrive, got" in told
                assert new in (
                    None,
                    {".gitattributes": b""} if is_new else before,
                    complete,
                )
            else:
                assert not told
                complete = complete or new
                assert new == complete
            push_folder(model, REPO, revision="new")
            assert hub.files[REPO]["new"] == complete or complete is None
            assert hub.files[REPO]["new"].keys() >= PUSHED
            assert len(hub.commits[REPO, "new"]) == 1
    raise AssertionError("the push does not end")


def test_two_pushes_at_once_do_not_mix(model: Path, tmp_path: Path, hub: Hub) -> None:
    other = tmp_path / "other"
    tiny_bert(seed=1).save_pretrained(other, max_shard_size="5KB")
    (other / "README.md").write_text("# Other\n")
    hub.files[REPO] = {"main": {}}
    both_have_listed = threading.Barrier(2)
    listed = []

    def meet(number: int, method: str, path: str) -> None:
        if path.endswith("/preupload/main") and len(listed) < 2:
            listed.append(path)
            both_have_listed.wait(timeout=60)

    hub.fault = meet
    futures = [
        push_folder(folder, REPO, run_as_future=True) for folder in (model, other)
    ]
    commits = [future.result(timeout=60) for future in futures]
    assert len(listed) == 2
    assert len(hub.commits[REPO, "main"]) == 2
    (last,) = (
        i for i, commit in enumerate(commits) if commit.oid == hub.head(REPO, "main")
    )
    files = hub.files[REPO]["main"]
    pushed = files_of((model, other)[last]).pushed
    assert {name: files[name] for name in pushed} == {
        name: path.read_bytes() for name, path in pushed.items()
    }
    weights = {name for name in files if "/" not in name and "safetensors" in name}
    assert weights == {
        name for name in pushed if "/" not in name and "safetensors" in name
    }
