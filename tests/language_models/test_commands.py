"""A judge of four options through the commands: plain texts in, prompts made of them, the same numbers everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from datasets import Dataset
from scipy.special import softmax
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers import pipeline as plain_pipeline

import hf_calib
from hf_calib._errors import InputValueError
from hf_calib.cards import write_card
from hf_calib.language_models import PromptTemplate, label_token_classifier
from hf_calib.metrics import negative_log_likelihood
from hf_calib.models.classifier import TASKS, load_classifier, predict
from hf_calib.models.texts import TextClassifier
from tests.helpers.commands import assert_refused, call, called_for_json
from tests.helpers.reports import quick_reports  # noqa: F401
from tests.helpers.tiny import tokenizer
from tests.language_models.models import language_model

LABELS = {"art": "w3", "law": "w9", "film": "w20", "sport": "w33"}
PROMPT = PromptTemplate("w1 {text} w2", ends_with=" w40 w41")
N = 120


def words_of(rng: np.random.Generator) -> str:
    return " ".join(f"w{i}" for i in rng.integers(5, 50, 8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved judge, and rows that its own probabilities, softened, have labelled."""
    made = tmp_path_factory.mktemp("judge")
    judge = label_token_classifier(language_model(), tokenizer(), LABELS, prompt=PROMPT)
    with torch.no_grad():
        judge.score.weight *= 3
    judge.save_pretrained(made / "judge")
    tokenizer().save_pretrained(made / "judge")
    rng = np.random.default_rng(0)
    texts = [words_of(rng) for _ in range(N)]
    logits = by_hand(judge, texts)
    labels = (logits / 2 + rng.gumbel(size=logits.shape)).argmax(axis=1)
    table = pandas.DataFrame({"text": texts, "label": np.array(list(LABELS))[labels]})
    table.to_csv(made / "rows.csv", index=False)
    # A test set is another file.
    table.iloc[::2].to_csv(made / "test.csv", index=False)
    np.savez(made / "by_hand.npz", logits=logits, labels=labels)
    return made


def by_hand(judge: Any, texts: list[str]) -> np.ndarray:
    rows = []
    for text in texts:
        ids = torch.tensor([tokenizer()(f"w1 {text} w2 w40 w41")["input_ids"]])
        with torch.no_grad():
            rows.append(judge(input_ids=ids).logits[0].double().numpy())
    return np.array(rows)


def test_evaluate_makes_the_prompts(folder: Path) -> None:
    found = called_for_json("evaluate", folder / "judge", "--data", folder / "rows.csv")
    with np.load(folder / "by_hand.npz") as hand:
        wanted = negative_log_likelihood(
            softmax(hand["logits"], axis=1), hand["labels"]
        )
    assert found["before"]["metrics"]["nll"]["value"] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("method", ["temperature", "isotonic"])
def test_calibrate_and_serve(folder: Path, method: str, tmp_path: Path) -> None:
    output = tmp_path / "calibrated"
    done = call(
        *(
            "calibrate",
            folder / "judge",
            "--data",
            folder / "rows.csv",
            "--test-data",
            folder / "test.csv",
        ),
        *("--method", method, "--output", output),
    )
    assert done.exit_code == 0, done.output
    texts = pandas.read_csv(folder / "rows.csv")["text"].tolist()[:5]
    classify = hf_calib.pipeline("text-classification", str(output), top_k=None)
    served = [{each["label"]: each["score"] for each in row} for row in classify(texts)]
    if method == "temperature":
        plain = plain_pipeline("text-classification", str(output), top_k=None)
        prompts = [PROMPT.render(text) for text in texts]
        for ours, row in zip(served, plain(prompts), strict=True):
            assert ours == pytest.approx(
                {each["label"]: each["score"] for each in row}, abs=1e-6
            )
    assert all(sum(row.values()) == pytest.approx(1, abs=1e-5) for row in served)


def test_a_long_text_is_cut_and_the_end_of_the_prompt_is_not(folder: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(folder / "judge")
    words = AutoTokenizer.from_pretrained(folder / "judge")
    classifier = TextClassifier(model.eval(), words, tuple(LABELS), TASKS["text"])
    (row,) = classifier.tokenize(["w7 " * 100], 20)
    assert len(row["input_ids"]) == 20
    assert words.decode(row["input_ids"]).split() == [
        "w1",
        *["w7"] * 16,
        "w2",
        "w40",
        "w41",
    ]
    classify = hf_calib.pipeline(
        "text-classification", str(folder / "judge"), top_k=None
    )
    scores = {
        each["label"]: each["score"]
        for each in classify(["w7 " * 100], truncation=True, max_length=20)[0]
    }
    with torch.no_grad():
        probs = (
            model(input_ids=torch.tensor([row["input_ids"]])).logits[0].softmax(dim=0)
        )
    assert scores == pytest.approx(
        dict(zip(LABELS, probs.tolist(), strict=True)), abs=1e-6
    )
    with pytest.raises(
        InputValueError,
        match=r"expected the prompt to have at most 3 tokens, got 4 tokens",
    ):
        classifier.tokenize(["w7"], 3)


def test_a_prompt_that_ends_with_the_padding_token_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    judge = label_token_classifier(
        language_model(), tokenizer(), LABELS, prompt=PromptTemplate("{text} [PAD]")
    )
    judge.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    done = call("evaluate", tmp_path, "--data", folder / "rows.csv")
    message = "expected a prompt to end with a token that is no padding, got '.PAD.' at the end of"
    assert_refused(done, f"{message} row 0")


def test_a_prompt_that_is_cut_at_a_padding_token_is_named_by_its_row(
    tmp_path: Path,
) -> None:
    """Only long texts are cut, so that their number among these is not that of the row."""
    judge = label_token_classifier(
        language_model(), tokenizer(), LABELS, prompt=PromptTemplate("{text}")
    )
    judge.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    texts = ["w1 w2", "w1 w2 w3 w4", "w1 w2 [PAD] w4"]
    rows = Dataset.from_dict({"text": texts, "label": [0, 1, 0]})
    judge = load_classifier(tmp_path)
    cut = predict(judge, rows.select([0, 1]), max_length=3).as_logits()
    alone = predict(judge, Dataset.from_dict({"text": ["w1 w2 w3"], "label": [0]}))
    np.testing.assert_allclose(cut[1], alone.as_logits()[0], atol=1e-6)
    with pytest.raises(
        ValueError, match=r"got '.PAD.' at the end of row 2; set another"
    ):
        predict(judge, rows, max_length=3)


def test_the_card_shows_the_prompt(folder: Path) -> None:
    write_card(folder / "judge")
    card = (folder / "judge" / "README.md").read_text()
    assert "w1 {text} w2" in card
    assert "from hf_calib import pipeline" in card
