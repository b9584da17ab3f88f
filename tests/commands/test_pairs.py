"""Models that read two texts as one input, as those of entailment and rerankers do, through the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from scipy.special import expit
from tokenizers.processors import TemplateProcessing
from transformers import GPT2Config, GPT2ForSequenceClassification, pipeline

import hf_calib
from hf_calib.cards import write_card
from tests.helpers.commands import NAMES, call, called_for_json
from tests.helpers.reports import quick_reports  # noqa: F401
from tests.helpers.tiny import sequences, text_of, tiny_bert, tokenizer

PAIRS = ("--text-column", "premise", "--text-pair-column", "hypothesis")


def pair_tokenizer() -> Any:
    made = tokenizer()
    # The tiny model looks at the first token only, which is of the second text here.
    pair = "$B:1 [SEP]:1 $A:0 [SEP]:0"
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A [SEP]", pair=pair, special_tokens=[("[SEP]", 3)]
    )
    return made


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of pairs, and rows whose labels depend on which of the two texts comes first."""
    folder = tmp_path_factory.mktemp("pairs")
    names = dict(enumerate(NAMES))
    model = tiny_bert(id2label=names, label2id={name: i for i, name in names.items()})
    model.save_pretrained(folder / "model")
    pair_tokenizer().save_pretrained(folder / "model")
    for name, seed in (("data", 1), ("test", 2)):
        ids = sequences(model, 80, seed=seed)["input_ids"]
        firsts, seconds = (
            [text_of(row[:3]) for row in ids],
            [text_of(row[3:7]) for row in ids],
        )
        encoded = pair_tokenizer()(firsts, seconds, padding=True, return_tensors="pt")
        with torch.no_grad():
            labels = model(**encoded).logits.argmax(dim=1).numpy()
        table = {
            "premise": firsts,
            "hypothesis": seconds,
            "label": [NAMES[i] for i in labels],
        }
        pandas.DataFrame(table).to_csv(folder / f"{name}.csv", index=False)
    return folder


def test_a_plain_pipeline_serves_what_was_calibrated(
    place: Path, tmp_path: Path
) -> None:
    words = ("--data", place / "data.csv", "--test-data", place / "test.csv", *PAIRS)
    result = call("calibrate", place / "model", *words, "--output", tmp_path / "m")
    assert result.exit_code == 0, result.output
    rows = pandas.read_csv(place / "test.csv")
    asked = (
        rows[["premise", "hypothesis"]]
        .set_axis(["text", "text_pair"], axis=1)
        .to_dict("records")
    )
    served = pipeline("text-classification", str(tmp_path / "m"), top_k=None)(asked)
    probs = np.array(
        [
            [next(e["score"] for e in row if e["label"] == name) for name in NAMES]
            for row in served
        ]
    )
    report = called_for_json(
        "evaluate", tmp_path / "m", "--data", place / "test.csv", *PAIRS
    )
    labels = np.array([NAMES.index(label) for label in rows["label"]])
    wanted = -np.log(probs[np.arange(len(labels)), labels]).mean()
    assert report["before"]["metrics"]["nll"]["value"] == pytest.approx(
        wanted, rel=1e-4
    )
    # As the command on the card does.
    about = json.loads((tmp_path / "m/calibration/report.json").read_text())["about"]
    assert about["options"] == ["--data", "test.csv", *PAIRS]


@pytest.fixture(scope="module")
def reranker(place: Path) -> Path:
    model = tiny_bert(num_labels=1)
    model.save_pretrained(place / "reranker")
    pair_tokenizer().save_pretrained(place / "reranker")
    rows = pandas.read_csv(place / "data.csv")
    for name, seed in (("scored", 0), ("scored_test", 1)):
        draw = np.random.default_rng(seed).random(len(rows))
        texts = rows["premise"].tolist(), rows["hypothesis"].tolist()
        encoded = pair_tokenizer()(*texts, padding=True, return_tensors="pt")
        with torch.no_grad():
            probs = (model(**encoded).logits[:, 0] / 3).sigmoid().numpy()
        rows.assign(label=(draw < probs).astype(int)).to_csv(
            place / f"{name}.csv", index=False
        )
    return place / "reranker"


class TestOneLogit:
    """As cross encoders on the Hub are: one output, no problem_type, and a sigmoid by every pipeline."""

    def test_its_sigmoid_is_calibrated(
        self, reranker: Path, place: Path, tmp_path: Path
    ) -> None:
        words = (
            "--data",
            place / "scored.csv",
            "--test-data",
            place / "scored_test.csv",
            *PAIRS,
        )
        found = called_for_json(
            "calibrate", reranker, *words, "--output", tmp_path / "m"
        )["report"]
        before, after = (
            found[state]["metrics"]["micro_nll"]["value"]
            for state in ("before", "after")
        )
        assert after < before
        rows = pandas.read_csv(place / "scored_test.csv")
        asked = (
            rows[["premise", "hypothesis"]]
            .set_axis(["text", "text_pair"], axis=1)
            .to_dict("records")
        )
        served = pipeline("text-classification", str(tmp_path / "m"))(asked)
        p = np.array([each["score"] for each in served])
        wanted = -np.log(np.where(rows["label"] == 1, p, 1 - p)).mean()
        assert after == pytest.approx(wanted, rel=1e-4)
        again = called_for_json(
            "evaluate", tmp_path / "m", "--data", place / "scored_test.csv", *PAIRS
        )
        assert again["before"]["metrics"]["micro_nll"]["value"] == pytest.approx(
            wanted, rel=1e-4
        )

    def test_what_vllm_is_told_of_an_offset_that_a_decoders_head_loses(
        self, reranker: Path, place: Path, tmp_path: Path
    ) -> None:
        config = GPT2Config(
            vocab_size=64,
            n_embd=16,
            n_layer=1,
            n_head=2,
            n_positions=64,
            num_labels=1,
            pad_token_id=0,
        )
        model = GPT2ForSequenceClassification(config)
        torch.nn.init.constant_(model.transformer.ln_f.bias, 1.0)
        torch.nn.init.constant_(
            model.score.weight, 0.1
        )  # every logit is near 1.6, and most labels are 0
        model.save_pretrained(tmp_path / "gpt")
        pair_tokenizer().save_pretrained(tmp_path / "gpt")
        rows = pandas.concat([pandas.read_csv(place / "scored.csv")] * 5)
        rows.assign(label=(np.arange(len(rows)) % 6 == 0).astype(int)).to_csv(
            tmp_path / "rows.csv", index=False
        )
        words = ("--data", tmp_path / "rows.csv", *PAIRS, "--method", "auto")
        done = called_for_json(
            "calibrate", tmp_path / "gpt", *words, "--output", tmp_path / "m"
        )
        assert done["folded"] is False
        told = json.loads((tmp_path / "m" / "calibration.json").read_text())[
            "vllm_pooler_config"
        ]
        asked = {"text": "w1 w2", "text_pair": "w3"}
        logit = pipeline(
            "text-classification", str(tmp_path / "m"), function_to_apply="none"
        )(asked)["score"]
        wanted = hf_calib.pipeline("text-classification", str(tmp_path / "m"))(asked)[
            "score"
        ]
        # As vLLM 0.33 computes it.
        assert expit(
            (logit - told["logit_mean"]) / told["logit_sigma"]
        ) == pytest.approx(wanted, abs=1e-6)
        write_card(tmp_path / "m")
        assert (
            f"--pooler-config '{json.dumps(told)}'"
            in (tmp_path / "m" / "README.md").read_text()
        )
