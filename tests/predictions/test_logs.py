"""Logs of other tools: read as the tool scores them, or refused with the row."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import pipeline

from hf_calib import InputError
from hf_calib.predictions import LogOptions, load_log, load_predictions
from hf_calib.predictions.logs import is_log
from tests.helpers.commands import assert_refused, call, called_for_json
from tests.helpers.places import GOLDEN
from tests.helpers.reports import quick_reports  # noqa: F401
from tests.helpers.tiny import sequences, text_of, tiny_bert, tokenizer

# Written by lm-evaluation-harness 0.4.13, --log_samples, of a task with 3 or 4 answers and metrics acc and acc_norm.
HARNESS = GOLDEN / "logs" / "samples_animals.jsonl"
TOKENS = {"yes": ["Yes", " yes"], "no": ["No"]}


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) if path.suffix == ".jsonl" else json.dumps(rows))
    return path


class TestHarness:
    @pytest.mark.parametrize(("option_scores", "metric"), [("sum", "acc"), ("per_character", "acc_norm")])
    def test_the_answers_are_right_where_the_harness_says(self, option_scores: Any, metric: str) -> None:
        rows = [json.loads(line) for line in HARNESS.read_text().splitlines()]
        found = load_log(HARNESS, LogOptions(option_scores=option_scores))
        assert found.n_classes == 4
        right = found.probabilities().argmax(axis=1) == found.labels
        np.testing.assert_array_equal(right, [row[metric] == 1 for row in rows])
        few = np.array([len(row["doc"]["choices"]) == 3 for row in rows])
        assert few.any()
        np.testing.assert_array_equal(found.probabilities()[:, 3] == 0, few)
        np.testing.assert_allclose(found.probabilities().sum(axis=1), 1)

    def test_the_sum_is_the_log_likelihood(self) -> None:
        row = json.loads(HARNESS.read_text().splitlines()[1])
        values = np.array([float(value) for value, _ in row["filtered_resps"]])
        wanted = np.exp(values) / np.exp(values).sum()
        np.testing.assert_allclose(load_log(HARNESS).probabilities()[1], wanted)

    def test_bytes_and_targets_as_texts(self, tmp_path: Path) -> None:
        row = json.loads(HARNESS.read_text().splitlines()[1])
        row |= {"target": f"{row['doc']['choices'][2]} ", "acc": 0.0}
        row["arguments"]["gen_args_0"]["arg_1"] = " ééé"
        found = load_log(written(tmp_path / "a.jsonl", [row]), LogOptions(option_scores="per_byte"))
        assert found.labels.tolist() == [2]
        assert found.as_logits()[0, 0] == pytest.approx(float(row["filtered_resps"][0][0]) / 6)

    def test_refused(self, tmp_path: Path) -> None:
        row = json.loads(HARNESS.read_text().splitlines()[0])
        with pytest.raises(InputError, match=r"doc_id to be there once, got 0 twice \(filter 'none'\)"):
            load_log(written(tmp_path / "a.jsonl", [row, row]))
        with pytest.raises(
            InputError, match=r"a log-likelihood for each of at least 2 answers, got .*in row 0"
        ):
            load_log(written(tmp_path / "b.jsonl", [row | {"filtered_resps": ["a text"]}]))
        longer = row | {"filtered_resps": [*row["filtered_resps"], ["-1.0", "False"]]}
        with pytest.raises(InputError, match=r"log-likelihood for each .*, got .* for 3 answers in row 0"):
            load_log(written(tmp_path / "c.jsonl", [longer]))
        for target in ("7", "3", "a whale", "1"):  # the last is another answer than the one acc says
            message = rf"the target to be the index or the text .* as acc says, got '{target}' in row 0"
            with pytest.raises(InputError, match=message):
                load_log(written(tmp_path / "d.jsonl", [row | {"target": target}]))

    def test_an_index_that_is_also_the_text_of_another_answer(self, tmp_path: Path) -> None:
        def row(place: int, target: str, best: int, acc: float | None) -> dict[str, Any]:
            answers = {f"gen_args_{i}": {"arg_1": f" {each}"} for i, each in enumerate((3, 2, 1, 4))}
            likelihoods = [[str(-1.0 - (i != best)), "False"] for i in range(4)]
            found = {"doc_id": place, "arguments": answers, "filtered_resps": likelihoods, "target": target}
            return found if acc is None else found | {"acc": acc}

        indices = [row(0, "3", 3, 1.0), row(1, "2", 3, 0.0)]
        assert load_log(written(tmp_path / "a.jsonl", indices)).labels.tolist() == [3, 2]
        texts = [row(0, "3", 0, 1.0), row(1, "2", 3, 0.0)]
        assert load_log(written(tmp_path / "b.jsonl", texts)).labels.tolist() == [0, 1]
        unsaid = [row(0, "3", 0, None)]
        assert load_log(written(tmp_path / "c.jsonl", unsaid)).labels.tolist() == [3]


class TestPipeline:
    def test_of_a_real_one(self, tmp_path: Path) -> None:
        names = {i: f"LABEL_{i}" for i in range(12)}
        model = tiny_bert(num_labels=12, id2label=names, label2id={name: i for i, name in names.items()})
        rows = sequences(model, 20)
        texts = [text_of(ids) for ids in rows["input_ids"]]
        serve = pipeline("text-classification", model=model, tokenizer=tokenizer(), top_k=None)
        outputs = serve(texts)
        lines = [
            {"text": text, "output": output, "gold": f"LABEL_{label}"}
            for text, output, label in zip(texts, outputs, rows["label"], strict=True)
        ]
        found = load_log(written(tmp_path / "a.jsonl", lines), LogOptions("gold"))
        assert found.class_names == tuple(names.values())
        np.testing.assert_array_equal(found.labels, rows["label"])
        for output, probs in zip(outputs, found.probabilities(), strict=True):
            for each in output:
                assert probs[found.names.index(each["label"])] == pytest.approx(each["score"], rel=1e-5)
        batched = [line | {"output": [line["output"]]} for line in lines]
        again = load_log(written(tmp_path / "b.jsonl", batched), LogOptions("gold"))
        np.testing.assert_array_equal(again.as_logits(), found.as_logits())

    def test_refused(self, tmp_path: Path) -> None:
        top = {"label": "a", "output": [{"label": "a", "score": 0.7}]}
        with pytest.raises(InputError, match=r"sum to 1, got 0.7 in row 0; call the pipeline with top_k"):
            load_log(written(tmp_path / "a.jsonl", [top]))
        for scores, got in (((-0.5, 1.5), "-0.5"), ((math.nan, 1.0), "nan")):
            both = [{"label": name, "score": score} for name, score in zip("ab", scores, strict=True)]
            with pytest.raises(InputError, match=f"to be probabilities that sum to 1, got {got} in row 0"):
                load_log(written(tmp_path / "c.jsonl", [{"label": "a", "output": both}]))
        whole = {"output": [{"label": "a", "score": 0.7}, {"label": "b", "score": 0.3}]}
        with pytest.raises(InputError, match=r"each row to have the key 'label', got output in row 0"):
            load_log(written(tmp_path / "b.jsonl", [whole]))


class TestNextToken:
    def chat(self, label: str, **shares: float) -> dict[str, Any]:
        top = [{"token": token, "logprob": math.log(share), "bytes": None} for token, share in shares.items()]
        content = [{"token": top[0]["token"], "logprob": top[0]["logprob"], "top_logprobs": top}]
        choice = {"index": 0, "message": {"content": "..."}, "logprobs": {"content": content}}
        return {"label": label, "response": {"object": "chat.completion", "choices": [choice]}}

    def test_shares_of_tokens_add_up(self, tmp_path: Path) -> None:
        rows = [
            self.chat("yes", **{"Yes": 0.5, " yes": 0.1, "No": 0.2, "Maybe": 0.1}),
            self.chat("no", Yes=0.9),
        ]
        found = load_log(written(tmp_path / "a.jsonl", rows), LogOptions(label_tokens=TOKENS))
        assert found.class_names == ("yes", "no")
        np.testing.assert_allclose(found.probabilities(), [[0.75, 0.25], [1, 0]], atol=1e-9)
        assert found.labels.tolist() == [0, 1]

    def test_completions(self, tmp_path: Path) -> None:
        top = {"Yes": math.log(0.3), "No": math.log(0.1)}
        row = {
            "label": "yes",
            "choices": [{"text": "Yes", "logprobs": {"tokens": ["Yes"], "top_logprobs": [top]}}],
        }
        found = load_log(written(tmp_path / "a.jsonl", [row]), LogOptions(label_tokens=TOKENS))
        np.testing.assert_allclose(found.probabilities(), [[0.75, 0.25]])

    def test_refused(self, tmp_path: Path) -> None:
        path = written(tmp_path / "a.jsonl", [self.chat("yes", Maybe=0.9)])
        with pytest.raises(InputError, match=r"label_tokens to say which tokens are which label"):
            load_log(path)
        with pytest.raises(
            InputError, match=r"top_logprobs to hold a token of a label, got 'Maybe' in row 0"
        ):
            load_log(path, LogOptions(label_tokens=TOKENS))
        twice = {"yes": ["Yes"], "no": ["No", "Yes"]}
        with pytest.raises(
            InputError, match="label_tokens to have each token in one label, got 'Yes' for yes and no"
        ):
            load_log(path, LogOptions(label_tokens=twice))


def test_a_byte_order_mark_and_a_line_separator_in_a_text(tmp_path: Path) -> None:
    row = {
        "text": "one\u2028line",
        "label": "a",
        "output": [{"label": "a", "score": 0.7}, {"label": "b", "score": 0.3}],
    }
    line = json.dumps(row, ensure_ascii=False)
    (tmp_path / "a.jsonl").write_text(f"{line}\n{line}\n", encoding="utf-8-sig")
    assert load_log(tmp_path / "a.jsonl").labels.tolist() == [0, 0]


def test_json_lines_of_a_table(tmp_path: Path) -> None:
    """Lines with the columns of a table are one, whatever else a line holds."""
    lists = [{"logits": [2.0, 0.5], "label": 0, "text": "a"}, {"logits": [0.1, 1.5], "label": 1, "text": "b"}]
    columns = [{"prob_no": 0.9, "prob_yes": 0.1, "label": "no"}, {"prob_no": 1, "prob_yes": 0, "label": "no"}]
    for rows, labels in ((lists, [0, 1]), (columns, [0, 0])):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        assert not is_log(str(path))
        assert load_predictions(path).labels.tolist() == labels


def test_what_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{not json")
    with pytest.raises(InputError, match=r"the log to be readable as JSON, got a.jsonl"):
        load_log(tmp_path / "a.jsonl")
    with pytest.raises(InputError, match=r"to be of a log that is known, got x in b.jsonl; known are lm-"):
        load_log(written(tmp_path / "b.jsonl", [{"x": 1}]))
    (tmp_path / "c.jsonl").write_text("")
    with pytest.raises(InputError, match=r"the log to hold objects, got none in c.jsonl"):
        load_log(tmp_path / "c.jsonl")


def test_commands(tmp_path: Path) -> None:
    found = called_for_json("evaluate", HARNESS, "--option-scores", "per_character")
    assert found["n_examples"] == 12
    assert found["n_classes"] == 4
    rows = [TestNextToken().chat("yes" if i % 3 else "no", Yes=0.8, No=0.15) for i in range(60)]
    log = written(tmp_path / "judge.jsonl", rows)
    tokens = json.dumps(TOKENS)
    result = call(
        "calibrate", log, "--label-tokens", tokens, "--method", "temperature", "--output", tmp_path / "out"
    )
    assert result.exit_code == 0, result.output
    assert_refused(
        call("evaluate", log, "--label-tokens", "yes"), "label_tokens to be JSON of a list of tokens"
    )
    assert call("report", HARNESS, tmp_path / "out").exit_code == 0
