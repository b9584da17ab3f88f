"""Rows that do not hold a probability for each class: top labels, one score, and class columns next to others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from hf_calib import InputError, calibrate, decide, evaluate
from hf_calib.decisions import Decisions, TopLabelRule
from hf_calib.metrics import expected_calibration_error
from hf_calib.predictions import (
    TopLabels,
    load_predictions,
    read_predictions,
    save_predictions,
)
from hf_calib.report import making, rows
from tests.helpers.commands import assert_refused, call
from tests.helpers.reports import quick_reports  # noqa: F401
from tests.helpers.tables import write_table

RNG = np.random.default_rng(0)


def top_labels(n: int = 2_000) -> pandas.DataFrame:
    """Confidences below 1/2 that are 15 points too low."""
    confidence = RNG.uniform(0.25, 0.45, n)
    correct = RNG.random(n) < confidence + 0.15
    columns = {"confidence": confidence, "correct": correct.astype(int), "zip": "007"}
    return pandas.DataFrame(columns)


def as_distributions(table: pandas.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Rows with the same top labels: what is left of 1 is spread over 4 less probable classes."""
    confidence = table["confidence"].to_numpy()[:, None]
    probs = np.concatenate([confidence, np.repeat((1 - confidence) / 4, 4, axis=1)], 1)
    return probs, 1 - table["correct"].to_numpy()


class TestTopLabels:
    def test_low_confidences_are_not_folded(self, tmp_path: Path) -> None:
        table = top_labels()
        table.to_csv(tmp_path / "top.csv", index=False)
        report = evaluate(tmp_path / "top.csv")
        assert report.verdict.startswith("Under-confident by 1")
        wanted = making.calibration_report(*as_distributions(table))
        for key, value in report.before.metrics.items():
            theirs = wanted.before.metrics[key].value
            assert value.value == pytest.approx(theirs, abs=1e-12), key
        assert len(report.before.metrics) == 12
        assert "nll" not in report.before.metrics
        assert any(
            "Only the confidence of the pred" in each for each in report.warnings
        )
        report.save(tmp_path / "out")
        assert (
            "2,000 examples, top labels only, ECE in 15 equal-width bins"
            in (tmp_path / "out/report.md").read_text()
        )

    @pytest.mark.slow
    def test_of_many_rows_and_with_weights(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        table = top_labels().assign(w=1.0, site=["a", "b"] * 1_000)
        table.to_parquet(tmp_path / "top.parquet")
        whole = evaluate(tmp_path / "top.parquet")
        weighted = evaluate(tmp_path / "top.parquet", weight_column="w", by=["site"])
        assert [each.n_rows for each in weighted.slices[0].slices] == [1_000, 1_000]
        monkeypatch.setattr(rows, "MOST_SORTED", 1_000)
        for report in (weighted, evaluate(tmp_path / "top.parquet")):
            ece = report.before.metrics["ece"].value
            assert ece == pytest.approx(whole.before.metrics["ece"].value, abs=1e-12)
            assert "nll" not in report.before.metrics
            report.save(tmp_path / "out")

    def test_predictions_and_labels_of_any_type(self, tmp_path: Path) -> None:
        table = top_labels()
        label = np.where(table["correct"], "a", "b")
        named = table.assign(prediction="a", label=label).drop(columns="correct")
        named.to_csv(tmp_path / "names.csv", index=False)
        numbers = named.assign(prediction=1.0, label=table["correct"])
        numbers.to_parquet(tmp_path / "numbers.parquet")
        flags = table.assign(correct=table["correct"] == 1)
        flags.to_json(tmp_path / "flags.jsonl", orient="records", lines=True)
        for name in ("names.csv", "numbers.parquet", "flags.jsonl"):
            found = read_predictions(tmp_path / name).predictions
            assert isinstance(found, TopLabels)
            np.testing.assert_array_equal(found.correct, table["correct"])

    def written(self, path: Path, predicted: Any, labels: Any) -> Path:
        confidence = np.full(len(labels), 0.8)
        columns = {"confidence": confidence, "prediction": predicted}
        if path.suffix == ".npz":
            np.savez(path, **columns, labels=labels)  # type: ignore[arg-type]
            return path
        return write_table(pandas.DataFrame({**columns, "label": labels}), path)

    @pytest.mark.parametrize("form", ["csv", "parquet", "jsonl", "npz"])
    @pytest.mark.parametrize(
        ("predicted", "labels", "correct"),
        [
            (["1", "2", "nan"], ["1", "2", "nan"], [1, 1, 1]),
            (["01", "1", "1"], ["1", "1", "1"], [0, 1, 1]),
            ([2**53 + 1, 2**53], [2**53 + 1, 2**53 + 1], [1, 0]),
            (["9007199254740993", "x"], ["9007199254740992", "x"], [0, 1]),
            (["2.0", "1"], ["2", "3"], [1, 0]),
            (["0.0", "1.0", "2.0"], ["0", "2", "other"], [1, 0, 0]),
            ([0.0, 1.0, 1.0], ["0", "1", "other"], [1, 1, 0]),
            ([0, 1, 1], [0.0, 1.0, 0.5], [1, 1, 0]),
            (["True", "False"], ["true", "true"], [1, 0]),
            (["us", "US", "us"], ["us", "us", "US"], [1, 0, 0]),
            (["Cat", "dog"], ["cat", "bird"], [1, 0]),
        ],
    )
    def test_the_prediction_is_the_label(
        self, predicted: Any, labels: Any, correct: Any, form: str, tmp_path: Path
    ) -> None:
        path = self.written(tmp_path / f"a.{form}", predicted, labels)
        found = read_predictions(path).predictions
        assert found.labels.tolist() == correct

    @pytest.mark.parametrize("form", ["csv", "parquet", "jsonl", "npz"])
    @pytest.mark.parametrize(
        ("predicted", "labels", "message"),
        [
            (["cat", "dog"], ["cat ", "dog "], "differ only by spaces"),
            (["cat", "dog"], ["cat ", "dog"], "differ only by spaces"),
            (["cat", "cat "], ["cat ", "cat"], "differ only by spaces"),
            ([0, 1], ["cat", "dog"], "'labels?' to hold the same classes, got 0, 1"),
            (["us", "US"], ["us", "de"], "in one way, got 'us', 'US'"),
            (["1", "1.0"], ["1", "x"], "to be written in one way, got '1', '1.0'"),
            (["1", "1.0"], ["1", "1"], "to be written in one way, got '1', '1.0'"),
            (["01", "2"], ["1", "02"], "in one way, got '01' and '1', '2' and '02'"),
            ([1, 2], ["01", "2"], "in one way, got '1' and '01'"),
        ],
    )
    def test_the_prediction_may_be_the_label(
        self, predicted: Any, labels: Any, message: str, form: str, tmp_path: Path
    ) -> None:
        path = self.written(tmp_path / f"a.{form}", predicted, labels)
        with pytest.raises(InputError, match=message):
            read_predictions(path)

    @pytest.mark.parametrize("form", ["csv", "parquet", "jsonl"])
    def test_a_score_next_to_predictions_is_their_confidence(
        self, form: str, tmp_path: Path
    ) -> None:
        table = top_labels().rename(columns={"confidence": "score"})
        path = write_table(table, tmp_path / f"a.{form}")
        found = read_predictions(path).predictions
        assert isinstance(found, TopLabels)
        np.testing.assert_allclose(found.confidence, table["score"])
        np.testing.assert_array_equal(found.correct, table["correct"])
        label = np.where(table["correct"], "a", np.where(table.index % 2, "b", "c"))
        named = table.drop(columns="correct").assign(prediction="a", label=label)
        found = read_predictions(write_table(named, path)).predictions
        assert isinstance(found, TopLabels)
        np.testing.assert_array_equal(found.correct, table["correct"])
        calibrate(path, tmp_path / "out", method="isotonic")
        written = pandas.read_parquet(tmp_path / "out" / "predictions.parquet")
        assert {*written.columns} == {*named.columns}

    @pytest.mark.parametrize("form", ["csv", "parquet", "jsonl"])
    @pytest.mark.parametrize(
        "columns",
        [
            {"prediction": ["n", "p", "n"], "label": ["n", "p", "p"]},
            {"prediction": [0, 1, 0], "label": [0, 1, 1]},
            {"prediction": [False, True, False], "label": [False, True, True]},
            {"correct": [1, 1, 0], "label": ["n", "p", "p"]},
        ],
    )
    def test_a_score_below_a_half_may_be_that_of_one_of_two_classes(
        self, columns: Any, form: str, tmp_path: Path
    ) -> None:
        table = pandas.DataFrame({"score": [0.2, 0.8, 0.4], **columns})
        path = write_table(table, tmp_path / f"a.{form}")
        message = rf"'score' to be at least 0\.5, .* got 0\.2 in row 0 of a\.{form}"
        with pytest.raises(InputError, match=message):
            read_predictions(path)
        for name in ("confidence", "score"):
            named = table.rename(columns={"score": name})
            if name == "score":
                named["score"] = [0.5, 0.8, 0.6]
            write_table(named, path)
            found = read_predictions(path).predictions
            assert isinstance(found, TopLabels)
            np.testing.assert_allclose(found.confidence, named[name])

    def test_classes_next_to_a_confidence_that_is_named_score(
        self, tmp_path: Path
    ) -> None:
        text = "neg,pos,score,prediction,label\n.9,.1,.9,neg,neg\n.2,.8,.8,pos,neg\n"
        (tmp_path / "a.csv").write_text(text)
        with pytest.raises(InputError, match="next to neg, pos, whose rows sum"):
            read_predictions(tmp_path / "a.csv")

    def test_predictions_that_are_no_integers_or_texts(self, tmp_path: Path) -> None:
        flags = np.array([True, False, True])
        for form in ("parquet", "npz"):
            path = self.written(tmp_path / f"a.{form}", flags, np.array([1, 0, 0]))
            assert read_predictions(path).predictions.labels.tolist() == [1, 1, 0]
            rounded = np.array([1.0, 2.0**53 + 2])
            path = self.written(tmp_path / f"a.{form}", rounded, np.array([1, 2]))
            with pytest.raises(InputError, match=r"not exact, got 9007.* in row 1"):
                read_predictions(path)
        names = np.array([b"a", b"b"])
        path = self.written(tmp_path / "a.npz", names, np.array(["a", "a"]))
        assert read_predictions(path).predictions.labels.tolist() == [1, 0]
        missing = np.array([1.0, np.nan])
        path = self.written(tmp_path / "a.npz", missing, np.array([1, 1]))
        with pytest.raises(InputError, match="label in every row, got none in row 1"):
            read_predictions(path)

    def test_integers_beyond_64_bits_are_compared_exactly(self, tmp_path: Path) -> None:
        labels = [2**63, 2**63 + 1]
        path = self.written(tmp_path / "a.jsonl", labels[::-1], labels)
        assert read_predictions(path).predictions.labels.tolist() == [0, 0]

    @pytest.mark.slow
    def test_arrays(self, tmp_path: Path) -> None:
        table = top_labels()
        confidence = table["confidence"].to_numpy()
        correct = table["correct"].to_numpy()
        found = TopLabels(confidence, correct)
        save_predictions(found, tmp_path / "a.npz")
        np.savez(
            tmp_path / "b.npz",
            confidence=confidence,
            prediction=correct,
            labels=correct,
        )
        again = read_predictions(tmp_path / "a.npz").predictions
        np.testing.assert_array_equal(again.labels, correct)
        right = read_predictions(tmp_path / "b.npz").predictions
        assert right.labels.all()
        done = calibrate(tmp_path / "a.npz", tmp_path / "out")
        calibrated = read_predictions(tmp_path / "out" / "predictions.npz").predictions
        assert len(calibrated) == done.report.n_examples == 1_000
        for arrays, message in (
            ({"confidence": confidence}, "to hold the array correct, or prediction"),
            (
                {"confidence": confidence, "correct": correct + 1},
                "correct to be 0 or 1, got 2 in row .* of c.npz",
            ),
            (
                {"confidence": confidence + 1, "correct": correct},
                r"to lie in \[0, 1\], got",
            ),
            ({"confidence": confidence[1:], "correct": correct}, "same number of rows"),
        ):
            np.savez(tmp_path / "c.npz", **arrays)
            with pytest.raises(InputError, match=message):
                read_predictions(tmp_path / "c.npz")

    @pytest.mark.slow
    def test_calibrated_with_their_other_columns(self, tmp_path: Path) -> None:
        top_labels().to_csv(tmp_path / "top.csv", index=False)
        done = calibrate(tmp_path / "top.csv", tmp_path / "out")
        assert done.report.before.overall.p_value < 1e-6
        assert done.report.after is not None
        assert done.report.after.overall.p_value > 1e-3
        written = pandas.read_parquet(tmp_path / "out" / "predictions.parquet")
        assert {*written["zip"]} == {"007"}
        again = evaluate(tmp_path / "out" / "predictions.parquet")
        value = done.report.after.metrics["ece"].value
        assert again.before.metrics["ece"].value == pytest.approx(value, abs=1e-12)

    def test_a_rule_answers_by_the_confidence(self, tmp_path: Path) -> None:
        confidence = np.repeat([0.2, 0.45], 1_000)
        correct = np.concatenate([RNG.random(1_000) < 0.5, RNG.random(1_000) < 0.97])
        table = pandas.DataFrame({"confidence": confidence, "correct": correct})
        table.to_csv(tmp_path / "top.csv", index=False)
        done = decide(tmp_path / "top.csv", accuracy=0.9, output=tmp_path / "out")
        assert done.section.before["answered"].value == 0.5
        assert done.section.before["accuracy"].value > 0.95
        saved = Decisions.from_pretrained(tmp_path / "out")
        assert isinstance(saved.rule, TopLabelRule)
        assert saved(np.array([[0.8, 0.2], [0.55, 0.45]])) == [None, "correct"]
        table[::2].to_csv(tmp_path / "other.csv", index=False)
        for words in (["--by-class"], ["--alpha", 0.1]):
            refused = call("decide", tmp_path / "top.csv", *words)
            assert_refused(
                refused, "got the confidences of top labels; give an accuracy"
            )

    def test_what_needs_all_classes_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "top.csv"
        top_labels().to_csv(path, index=False)
        top_labels().to_csv(tmp_path / "other.csv", index=False)
        with pytest.raises(
            InputError, match="to have a score for each class, got the conf"
        ):
            load_predictions(path)
        np.savez(tmp_path / "soft.npz", soft_labels=np.full((2_000, 2), 0.5))
        for words in (
            ["evaluate", path, "--ood-data", tmp_path / "other.csv"],
            ["evaluate", path, "--soft-labels", tmp_path / "soft.npz"],
        ):
            assert_refused(call(*words), "to be given with a score for each class only")
        words = ["calibrate", path, "--criterion", "ece", "--output", tmp_path / "out"]
        assert_refused(call(*words), "criterion to be nll for top labels")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                {"confidence": 55.0},
                r"confidence to lie in \[0, 1\], got 55 in row 0 of",
            ),
            (
                {"correct": 2},
                "correct to be 0 or 1, got 2 in row 0 of top.csv",
            ),
            ({"correct": "perhaps"}, "got 'perhaps' in row 0 of top.csv"),
            (
                {"correct": ""},
                "'correct' to hold a label in every row, got none in row 0",
            ),
        ],
    )
    def test_wrong_rows(self, change: Any, message: str, tmp_path: Path) -> None:
        top_labels(3).assign(**change).to_csv(tmp_path / "top.csv", index=False)
        with pytest.raises(InputError, match=message):
            read_predictions(tmp_path / "top.csv")


class TestScores:
    def rows(self, name: str, path: Path) -> tuple[np.ndarray, np.ndarray]:
        score = RNG.random(2_000)
        labels = (RNG.random(2_000) < score).astype(int)
        pandas.DataFrame({name: score, "label": labels}).to_csv(path, index=False)
        return score, labels

    @pytest.mark.parametrize("name", ["score", "prob_relevant"])
    def test_the_complement_is_made(self, name: str, tmp_path: Path) -> None:
        score, labels = self.rows(name, tmp_path / "s.csv")
        found = read_predictions(tmp_path / "s.csv").predictions
        pairs = np.stack([1 - score, score], axis=1)
        np.testing.assert_allclose(found.probabilities(), pairs)
        np.testing.assert_array_equal(found.labels, labels)
        ece = evaluate(tmp_path / "s.csv").before.metrics["ece"].value
        assert ece == pytest.approx(expected_calibration_error(pairs, labels))

    def test_a_rule_and_a_calibration(self, tmp_path: Path) -> None:
        self.rows("score", tmp_path / "s.csv")
        done = decide(tmp_path / "s.csv", accuracy=0.9)
        assert 0.1 < done.section.before["answered"].value < 0.5
        calibrate(tmp_path / "s.csv", tmp_path / "out")
        written = pandas.read_parquet(tmp_path / "out" / "predictions.parquet")
        assert [*written.columns] == ["score", "label"]
        assert (
            len(read_predictions(tmp_path / "out" / "predictions.parquet").predictions)
            == 1_000
        )

    @pytest.mark.parametrize("form", ["csv", "parquet", "jsonl"])
    def test_true_is_the_second_class(self, form: str, tmp_path: Path) -> None:
        path = tmp_path / f"s.{form}"

        def labels(name: str, names: list[str] | None = None) -> list[int]:
            table = pandas.DataFrame({name: [0.2, 0.9], "label": [False, True]})
            write_table(table, path)
            return read_predictions(path, class_names=names).predictions.labels.tolist()

        for name in ("score", "prob_spam", "prob_1", "prob_True"):
            assert labels(name) == [0, 1]
        assert labels("score", ["ham", "spam"]) == [0, 1]
        assert labels("score", ["True", "False"]) == [1, 0]
        with pytest.raises(InputError, match="to be the positive one"):
            labels("prob_False")

    def test_texts_need_their_order(self, tmp_path: Path) -> None:
        table = pandas.DataFrame({"score": [0.2, 0.9], "label": ["ham", "spam"]})
        table.to_csv(tmp_path / "s.csv", index=False)
        with pytest.raises(InputError, match="got 'ham' in row 0"):
            read_predictions(tmp_path / "s.csv")
        names = ["ham", "spam"]
        found = read_predictions(tmp_path / "s.csv", class_names=names).predictions
        assert found.labels.tolist() == [0, 1]

    @pytest.mark.parametrize("form", ["csv", "parquet", "jsonl"])
    @pytest.mark.parametrize("name", ["0", "2", "0.0"])
    def test_a_class_that_is_a_number(
        self, name: str, form: str, tmp_path: Path
    ) -> None:
        table = pandas.DataFrame({f"prob_{name}": [0.2, 0.9], "label": [1, 0]})
        path = write_table(table, tmp_path / f"s.{form}")
        with pytest.raises(InputError, match=f"no number but 1, got 'prob_{name}'"):
            read_predictions(path)
        if name == "2":
            return
        found = read_predictions(path, class_names=["1", name]).predictions
        assert [found.names[each] for each in found.labels] == ["1", name]
        np.testing.assert_allclose(found.probabilities()[:, 1], [0.2, 0.9])
        with pytest.raises(InputError, match=f"class of column 'prob_{name}' last"):
            read_predictions(path, class_names=[name, "1"])
        with pytest.raises(InputError, match="to be no number but 1"):
            read_predictions(path, class_names=["ham", "spam"])

    @pytest.mark.parametrize("form", ["csv", "parquet", "jsonl"])
    @pytest.mark.parametrize("labels", [[0, 1, 1], ["neg", "pos", "pos"]])
    def test_classes_next_to_a_score_are_not_ignored(
        self, labels: Any, form: str, tmp_path: Path
    ) -> None:
        """The score may be that of the predicted class."""
        columns = {"id": [3, 4, 5], "neg": [0.9, 0.2, 0.4], "pos": [0.1, 0.8, 0.6]}
        table = pandas.DataFrame({**columns, "flag": 1.0, "score": [0.9, 0.8, 0.6]})
        path = write_table(table.assign(label=labels), tmp_path / f"s.{form}")
        message = r"'score' next to neg, pos, whose rows sum to 1; keep one of them"
        with pytest.raises(InputError, match=message):
            read_predictions(path)
        named = {"neg": "prob_neg", "pos": "prob_pos"}
        write_table(table.assign(label=labels).rename(columns=named), path)
        assert load_predictions(path).class_names == ("neg", "pos")

    def test_certain_classes_that_labels_name_are_not_ignored(
        self, tmp_path: Path
    ) -> None:
        text = "neg,pos,score,label\n1,0,1,neg\n0,1,1,pos\n"
        (tmp_path / "s.csv").write_text(text)
        with pytest.raises(InputError, match="next to neg, pos, whose rows sum"):
            read_predictions(tmp_path / "s.csv")

    @pytest.mark.parametrize("form", ["csv", "parquet", "jsonl"])
    def test_other_numbers_next_to_a_score(self, form: str, tmp_path: Path) -> None:
        table = pandas.DataFrame(
            {"age": [30, 41], "is_a": [1, 0], "is_b": [0, 1], "time": [0.4, 0.6]}
        )
        table = table.assign(cost=[0.6, 0.1], score=[0.2, 0.9], label=[0, 1])
        found = load_predictions(write_table(table, tmp_path / f"s.{form}"))
        np.testing.assert_allclose(found.probabilities()[:, 1], [0.2, 0.9])

    def test_scores_outside_of_0_and_1(self, tmp_path: Path) -> None:
        (tmp_path / "s.csv").write_text("score,label\n0.5,1\n1.5,1\n")
        with pytest.raises(
            InputError, match=r"hold probabilities, got 1\.5 in row 1 of s"
        ):
            read_predictions(tmp_path / "s.csv")


class TestPositiveClass:
    @pytest.mark.parametrize("form", ["csv", "parquet", "jsonl"])
    @pytest.mark.parametrize(
        ("name", "labels", "positive", "names"),
        [
            ("score", ["ham", "spam", "spam"], "spam", ("ham", "spam")),
            ("score", ["ham", "spam", "spam"], "Spam", ("ham", "Spam")),
            ("score", ["yes", "no", "no"], "no", ("yes", "no")),
            ("score", [1, 0, 0], "0", ("1", "0")),
            ("score", [5.0, 7.0, 7.0], "7", ("5", "7")),
            ("score", [True, False, False], "False", ("true", "False")),
            ("prob_neg", ["pos", "neg", "neg"], "neg", ("pos", "neg")),
            ("prob_0", [1, 0, 0], "0", ("1", "0")),
            ("prob_yes", ["yes", "yes", "yes"], "yes", ("not yes", "yes")),
            ("score", [0, 0, 0], "0", ("not 0", "0")),
            ("score", [5, 5, 5], "5", ("not 5", "5")),
            ("score", [0, 5, 5], "5", ("0", "5")),
        ],
    )
    def test_is_that_of_the_score(
        self,
        name: str,
        labels: Any,
        positive: str,
        names: tuple[str, str],
        form: str,
        tmp_path: Path,
    ) -> None:
        table = pandas.DataFrame({name: [0.2, 0.9, 0.7], "label": labels})
        path = write_table(table, tmp_path / f"s.{form}")
        read = read_predictions(path, positive_class=positive)
        found = read.predictions
        expected = [1, 1, 1] if labels[0] == labels[1] else [0, 1, 1]
        assert found.labels.tolist() == expected
        np.testing.assert_allclose(found.probabilities()[:, 1], [0.2, 0.9, 0.7])
        shown = [each.lower().removesuffix(".0") for each in found.names]
        assert shown == [each.lower() for each in names]
        (note,) = read.notes
        assert f"{name!r} is read as the probability of {positive!r}" in note

    def test_is_in_every_command_and_its_report(self, tmp_path: Path) -> None:
        score = RNG.random(400)
        label = np.where(RNG.random(400) < score, "spam", "ham")
        table = pandas.DataFrame({"score": score, "label": label})
        path = write_table(table, tmp_path / "s.csv")
        write_table(table[::3], tmp_path / "t.csv")
        pairs = np.stack([1 - score, score], axis=1)
        wanted = expected_calibration_error(pairs, (label == "spam").astype(int))
        report = evaluate(path, positive_class="spam", output=tmp_path / "out")
        assert report.before.metrics["ece"].value == pytest.approx(wanted)
        note = "and 1 minus it as that of 'ham'"
        assert any(note in each for each in report.notes)
        assert note in (tmp_path / "out" / "report.md").read_text()
        given: dict[str, Any] = {"positive_class": "spam"}
        done = calibrate(path, tmp_path / "c", method="temperature", **given)
        assert any(note in each for each in done.report.notes)
        decided = decide(path, accuracy=0.8, test_data=tmp_path / "t.csv", **given)
        assert sum(note in each for each in decided.notes) == 1

    def test_a_score_next_to_a_prediction_is_that_of_the_named_class(
        self, tmp_path: Path
    ) -> None:
        text = "prediction,score,label\nham,0.2,ham\nspam,0.9,ham\nspam,0.7,spam\n"
        (tmp_path / "s.csv").write_text(text)
        found = read_predictions(tmp_path / "s.csv", positive_class="spam").predictions
        assert found.labels.tolist() == [0, 0, 1]

    @pytest.mark.parametrize(
        ("text", "given", "message"),
        [
            (
                "score,label\n.2,a\n.4,b\n.9,c\n",
                {},
                "'label' to have one other label than 'a', got b, c; write a column",
            ),
            ("score,label\n.2,no\n.9,yes\n", {}, "to be a label in .*'a' for no, yes"),
            ("prob_a,prob_b,label\n.2,.8,a\n", {}, "with one score of two classes"),
            ("a,b,label\n.2,.8,a\n", {}, "with one score of two classes"),
            ("confidence,correct\n.2,1\n", {}, "with one score of two classes"),
            ("prob_b,label\n.2,a\n", {}, "to be the class of column 'prob_b', got"),
            (
                "score,label\n.2,a\n.4,b\n",
                {"class_names": ["b", "a"]},
                "class_names to be left out with positive_class",
            ),
            ("score,label\n.2,a\n", {"positive_class": ""}, "to be one text, or None"),
            ("score,label\n.2,a\n", {"positive_class": 1}, "to be one text, or None"),
        ],
    )
    def test_refused(self, text: str, given: Any, message: str, tmp_path: Path) -> None:
        (tmp_path / "s.csv").write_text(text)
        with pytest.raises(InputError, match=message):
            read_predictions(tmp_path / "s.csv", **{"positive_class": "a", **given})

    def test_arrays_have_all_classes(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "a.npz", probs=np.full((2, 2), 0.5), labels=[0, 1])
        with pytest.raises(InputError, match="positive_class to be given with a table"):
            read_predictions(tmp_path / "a.npz", positive_class="a")


class TestPrefix:
    def test_of_the_users_own(self, tmp_path: Path) -> None:
        table = pandas.DataFrame({"p_cat": [0.5, 0.1], "p_dog": [0.5, 0.9]})
        table = table.assign(prob_old=0.3, logit_old=2.0, label=["cat", "dog"])
        path = write_table(table, tmp_path / "a.csv")
        found = read_predictions(path, prob_prefix="p_").predictions
        assert found.class_names == ("cat", "dog")
        np.testing.assert_array_equal(found.labels, [0, 1])
        only = table[["p_cat", "label"]].assign(label=["dog", "cat"])
        read = read_predictions(
            write_table(only, path), prob_prefix="p_", positive_class="cat"
        )
        np.testing.assert_allclose(read.predictions.probabilities()[:, 1], [0.5, 0.1])

    def test_in_a_command(self, tmp_path: Path) -> None:
        probs = RNG.dirichlet([1, 1], 100)
        columns = {"p_a": probs[:, 0], "p_b": probs[:, 1], "label": ["a", "b"] * 50}
        path = write_table(pandas.DataFrame(columns), tmp_path / "a.csv")
        out = tmp_path / "out"
        words = ("--prob-prefix", "p_", "--output", out, "--method", "temperature")
        assert call("calibrate", path, *words).exit_code == 0
        written = load_predictions(out / "predictions.parquet")
        assert written.class_names == ("a", "b")

    @pytest.mark.parametrize(
        ("prefix", "message"),
        [
            ("q_", "given with columns that begin with it, got 'q_' with prob_a"),
            ("", "prob_prefix to be one text, or None"),
            ("lab", "the columns of labels, weights and by not to be those of classes"),
        ],
    )
    def test_refused(self, prefix: str, message: str, tmp_path: Path) -> None:
        text = "prob_a,prob_b,label,labx,laby\n.2,.8,a,.1,.9\n"
        (tmp_path / "a.csv").write_text(text)
        with pytest.raises(InputError, match=message):
            read_predictions(tmp_path / "a.csv", prob_prefix=prefix)

    def test_the_classes_of_all_files(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text("p_a,p_b,label\n.2,.8,a\n")
        (tmp_path / "b.csv").write_text("p_a,p_b,p_c,label\n.2,.8,0,a\n")
        with pytest.raises(InputError, match="those of the first file, got also 'p_c'"):
            read_predictions(tmp_path, prob_prefix="p_")


class TestClassColumnsWithoutPrefix:
    @pytest.mark.parametrize("form", ["csv", "parquet", "jsonl"])
    def test_numbers_next_to_them_are_no_classes(
        self, form: str, tmp_path: Path
    ) -> None:
        table = pandas.DataFrame({"id": [7, 8, 9], "cat": [0.5, 0.1, 0.3]})
        table = table.assign(dog=1 - table["cat"], seconds=[0.3, 0.4, 0.5], w=1.0)
        for labels in (["cat", "dog", "dog"], ["cat", "cat", "cat"]):
            own = table.drop(columns="seconds") if len({*labels}) == 1 else table
            path = write_table(own.assign(label=labels), tmp_path / f"a.{form}")
            found = load_predictions(path)
            assert found.class_names == ("cat", "dog")
            np.testing.assert_allclose(found.probabilities()[:, 0], table["cat"])
        # Ids do not say which columns are classes.
        path = write_table(table.assign(label=[0, 1, 1]), tmp_path / f"a.{form}")
        with pytest.raises(InputError, match="the class columns to hold probabilities"):
            load_predictions(path)

    def test_a_class_without_probability_is_one(self, tmp_path: Path) -> None:
        text = "cat,dog,cow,label\n.5,.5,0,cat\n.1,.9,0,dog\n"
        (tmp_path / "a.csv").write_text(text)
        assert load_predictions(tmp_path / "a.csv").class_names == ("cat", "dog", "cow")

    def test_a_label_that_no_column_names(self, tmp_path: Path) -> None:
        rows = [".5,.5,9,cat"] * 300 + [".5,.5,9,bird"]
        text = "\n".join(["cat,dog,n,label", *rows])
        (tmp_path / "a.csv").write_text(text)
        with pytest.raises(InputError, match=r"\(cat, dog\), got 'bird' in row 300"):
            load_predictions(tmp_path / "a.csv")

    @pytest.mark.parametrize("form", ["csv", "parquet", "jsonl"])
    def test_texts_next_to_them_are_no_classes(self, form: str, tmp_path: Path) -> None:
        table = pandas.DataFrame({"text": ["x", "y"], "cat": [0.5, 0.1]})
        table = table.assign(dog=[0.5, 0.9], label=["cat", "dog"])
        path = write_table(table, tmp_path / f"a.{form}")
        assert load_predictions(path).class_names == ("cat", "dog")

    def test_a_class_that_begins_with_a_missing_number(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text("cat,dog,label\n,1,dog\n0.5,0.5,cat\n")
        with pytest.raises(
            InputError, match=r"'cat' to hold numbers .* none in row 0 of"
        ):
            load_predictions(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"by": "id"}, "by to be a list of texts, got 'id'"),
        ({"by": None}, "by to be a list of texts, got None"),
        ({"class_names": "ab"}, "class_names to be a list of texts, got 'ab'"),
        ({"label_column": ["label"]}, "label_column to be one text, or None"),
        ({"weight_column": 3}, "weight_column to be one text, or None"),
        ({"option_scores": "acc_norm"}, "option_scores to be one of sum, per_char"),
        ({"sources": None}, "sources to be a list of texts, got None"),
        ({"sources": [None]}, r"sources to be a list of texts, got \[None\]"),
        ({"sources": b"a.csv"}, "sources to be a list of texts, got b'a.csv'"),
        ({"sources": [""]}, "sources to be a list of texts"),
    ],
)
def test_wrong_arguments_are_refused_in_words(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text("id,prob_a,prob_b,label\n1,0.4,0.6,b\n")
    arguments = {"sources": tmp_path / "a.csv", **given}
    with pytest.raises(InputError, match=message):
        read_predictions(**arguments)


@pytest.mark.parametrize("name", ["no", "False", "NEG", "negative"])
def test_one_probability_of_the_negative_class_needs_names(
    name: str, tmp_path: Path
) -> None:
    """Beside the labels 0 and 1, nobody can know which of them is "no"."""
    (tmp_path / "a.csv").write_text(f"prob_{name},label\n0.2,1\n0.9,0\n")
    with pytest.raises(InputError, match=r"prob_<class> to be the positive one"):
        read_predictions(tmp_path / "a.csv")
    found = read_predictions(tmp_path / "a.csv", class_names=("other", name))
    assert found.predictions.labels.tolist() == [1, 0]
