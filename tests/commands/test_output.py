"""Where commands write, and what they say meanwhile."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_calib.cli import app
from tests.helpers.commands import TEMPERATURE, call
from tests.helpers.interrupted_saving import in_a_fork
from tests.helpers.reports import quick_reports  # noqa: F401


class TestOutput:
    def test_a_full_disk(self, workplace: Path, tmp_path: Path) -> None:
        """The limit on a file's size stands for it."""
        call("evaluate", workplace / "data.npz", "--output", tmp_path)
        before = {
            path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
        }

        def work() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
            found = call("evaluate", workplace / "test.npz", "--output", tmp_path)
            raise RuntimeError(f"{found.exit_code} {found.stdout!r} {found.stderr}")

        assert in_a_fork(work)[1] == (
            f"RuntimeError: 2 '' hf-calib: expected --output to be writable, got {tmp_path} (File too large); "
            "make room there, or name another place\n"
        )
        assert {
            path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
        } == before

    @pytest.mark.parametrize("form", [[], ["--json"]])
    def test_a_full_or_closed_stdout(
        self,
        form: list[str],
        workplace: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: Any,
    ) -> None:
        with open("/dev/full", "w") as full:
            for stdout, got in (
                (full, "writable, got No space"),
                (None, "open, got a closed one; send"),
            ):
                monkeypatch.setattr(sys, "stdout", stdout)
                assert (
                    app(
                        ["evaluate", str(workplace / "test.npz"), *form],
                        standalone_mode=False,
                    )
                    == 2
                )
                assert capsys.readouterr().err.startswith(
                    f"hf-calib: expected stdout to be {got}"
                )

    @pytest.mark.parametrize("command", ["evaluate", "calibrate"])
    def test_an_earlier_report_is_replaced_and_nothing_else(
        self, command: str, workplace: Path, tmp_path: Path
    ) -> None:
        assert (
            call("evaluate", workplace / "test.npz", "--output", tmp_path).exit_code
            == 0
        )
        mine = (
            "mine.txt",
            "figures/mine.png",
            "figures/deep/mine.png",
            "calibration/mine.md",
        )
        for name in mine:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("mine")
        (tmp_path / "figures" / "reliability.png").write_text("an older one")
        words = (command, workplace / "data.npz", "--output", tmp_path)
        assert (
            call(*words, *(TEMPERATURE if command == "calibrate" else ())).exit_code
            == 0
        )
        assert [(tmp_path / name).read_text() for name in mine] == ["mine"] * 4
        assert not list(tmp_path.rglob("_saving*"))
        figure = (tmp_path / "figures" / "reliability.png").read_bytes()
        assert figure.startswith(b"\x89PNG")
