"""Results on disk: whole or not at all, and beside the files of others."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from hf_calib._errors import InputError
from hf_calib._files import check_output, whole_file, whole_folder
from hf_calib.plots import save_figure
from hf_calib.report.document import Document, Figures, Image
from tests.helpers.interrupted_saving import in_a_fork


def names_below(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file()
    }


def write(target: Path, text: str, *names: str) -> None:
    with whole_folder(target) as folder:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)


class TestBesideOtherFiles:
    def test_only_files_of_the_same_names_are_replaced(self, tmp_path: Path) -> None:
        there = (
            "notes.txt",
            "figures/a.png",
            "figures/mine.png",
            "figures/deep/a.png",
            "empty/a",
        )
        write(tmp_path, "mine", *there)
        (tmp_path / "empty" / "a").unlink()
        write(tmp_path, "new", "report.md", "figures/a.png", "figures/deep/b.png")
        new = {"report.md", "figures/a.png", "figures/deep/b.png"}
        assert names_below(tmp_path) == new | {
            "notes.txt",
            "figures/mine.png",
            "figures/deep/a.png",
        }
        for name in names_below(tmp_path):
            assert (tmp_path / name).read_text() == ("new" if name in new else "mine")
        assert (tmp_path / "empty").is_dir()

    def test_figures_that_a_new_report_does_not_have_are_removed(
        self, tmp_path: Path
    ) -> None:
        def report(target: Path, *figures: str) -> None:
            drawn = {figure: Image(b"png", 96) for figure in figures}
            shown = Figures(drawn, dict.fromkeys(figures, ""))
            with whole_folder(target) as folder:
                Document("Report", [shown]).write(folder / "calibration", {})

        report(tmp_path, "reliability", "slices_country", "entities")
        others = (
            "calibration/figures/mine.png",
            "figures/slices_country.png",
            "calibration/other.md",
        )
        for name in others:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("![mine](figures/mine.png)")
        report(tmp_path, "reliability", "corp")
        shown = {path.name for path in (tmp_path / "calibration/figures").iterdir()}
        assert shown == {"reliability.png", "corp.png", "mine.png"}
        assert all((tmp_path / name).is_file() for name in others)
        report(tmp_path)
        assert not (tmp_path / "calibration/figures/corp.png").exists()

    def test_figures_behind_a_link_stay(self, tmp_path: Path) -> None:
        write(tmp_path / "theirs", "png", "a.png")
        text = "![a](figures/a.png)\n![b](figures/../report.json)"
        write(tmp_path / "out", text, "report.md", "report.html", "report.json")
        (tmp_path / "out" / "figures").symlink_to(tmp_path / "theirs")
        write(tmp_path / "out", "new", "report.md", "report.html")
        assert (tmp_path / "theirs" / "a.png").is_file()
        assert (tmp_path / "out" / "report.json").is_file()

    def test_a_failure_changes_nothing(self, tmp_path: Path) -> None:
        write(tmp_path, "old", "a", "b/c")
        with pytest.raises(UnicodeEncodeError), whole_folder(tmp_path) as folder:
            (folder / "a").write_text("\ud800", encoding="utf-8")
        assert names_below(tmp_path) == {"a", "b/c"}
        assert (tmp_path / "a").read_text() == "old"

    @pytest.mark.parametrize(
        ("there", "new"), [("b/c", "b"), ("b", "b/c"), ("z/b/c", "z/b")]
    )
    def test_something_in_the_way_deep_inside(
        self, there: str, new: str, tmp_path: Path
    ) -> None:
        write(tmp_path, "mine", "a", there)
        message = r"b to be a (file, got a folder|folder, got a file); name another"
        with pytest.raises(ValueError, match=message):
            write(tmp_path, "new", "a", new)
        assert names_below(tmp_path) == {"a", there}
        assert (tmp_path / "a").read_text() == "mine"

    def test_a_link_to_a_folder_of_somebody_else(self, tmp_path: Path) -> None:
        mine = tmp_path / "mine"
        mine.mkdir()
        (mine / "b.png").write_text("mine")
        (tmp_path / "out").mkdir()
        (tmp_path / "out/figures").symlink_to(mine)
        message = r"figures to be a folder of its own, got a link to .*mine; remove"
        with pytest.raises(ValueError, match=message):
            write(tmp_path / "out", "new", "a", "figures/b.png")
        assert (mine / "b.png").read_text() == "mine"
        assert not (tmp_path / "out/a").exists()


class TestRefusedOutputs:
    @pytest.mark.parametrize(
        ("name", "message"),
        [
            (
                "link",
                r"expected output to be a folder, got .*link, a link to nothing; name another one",
            ),
            (
                "link/sub",
                r"expected output to be a folder, got .*link, a link to nothing",
            ),
            (
                "file",
                r"expected output to be a folder, got the file .*file; name another one",
            ),
            (
                "file/sub",
                r"expected output to be a folder, got the file .*file; name another one",
            ),
            *(
                (
                    name,
                    r"expected output to be writable, got .*x.* \(File name too long\); make room there",
                )
                for name in ("x" * 300, "new/" + "x" * 300, f"new/{'x' * 300}/a")
            ),
        ],
    )
    def test_a_folder(self, name: str, message: str, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(tmp_path / "nothing")
        (tmp_path / "file").write_text("mine")
        with pytest.raises(InputError, match=message):
            check_output(tmp_path / name)
        with pytest.raises(InputError, match=message):
            write(tmp_path / name, "new", "a")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]
        assert (tmp_path / "file").read_text() == "mine"

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("x" * 300, "File name too long"),
            ("folder", "Is a directory"),
            ("file/sub", "Not a directory|File exists"),
        ],
    )
    def test_a_file(self, name: str, reason: str, tmp_path: Path) -> None:
        (tmp_path / "folder").mkdir()
        (tmp_path / "file").write_text("mine")
        message = rf"expected output to be writable, got .* \(({reason})\); make room there, or name another"
        with (
            pytest.raises(OSError, match=message),
            whole_file(tmp_path / name) as unfinished,
        ):
            unfinished.write_text("new")
        assert names_below(tmp_path) == {"file"}

    @pytest.mark.parametrize("ending", ["txt", "png", "pdf", "svg"])
    def test_a_full_disk(self, ending: str, tmp_path: Path) -> None:
        """Each writer of matplotlib fails in its own way; a file in a folder is reported as the folder."""
        figure = Figure()
        figure.subplots().plot([1, 2, 3])
        write(tmp_path / "out", "old", "a")

        def work() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            with whole_folder(tmp_path / "out") as folder:
                if ending == "txt":
                    (folder / "a").write_text("x" * 2000)
                else:
                    save_figure(figure, folder / f"a.{ending}")

        _, told = in_a_fork(work)
        wanted = f"expected output to be writable, got {tmp_path / 'out'} (File too large); make room there"
        assert told == f"InputOSError: {wanted}, or name another place"
        assert names_below(tmp_path) == {"out/a"}
        assert (tmp_path / "out" / "a").read_text() == "old"
