"""Classifiers of texts: loaded, and run over labelled rows in their order, or a clear refusal."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
import transformers
from datasets import ClassLabel, Dataset, Features, Value

import hf_calib
from hf_calib._errors import InputError
from hf_calib.data.sources import load_rows
from hf_calib.models.classifier import (
    Classifier,
    find_task,
    load_classifier,
    predict,
)
from tests.helpers.tiny import N_LABELS, TEXT, sequences, text_of, tiny_bert, tokenizer
from tests.helpers.trained import tiny_vit

NAMES = ("art", "law", "NA", "sport")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model"), NAMES)


@pytest.fixture(scope="module")
def classifier(model_folder: Path) -> Classifier:
    return load_classifier(model_folder)


def saved(folder: Path, names: Any = None, **config: Any) -> Path:
    """A tiny model with its tokenizer, perhaps with names for its classes."""
    if names is not None:
        config |= {
            "id2label": dict(enumerate(names)),
            "label2id": {name: i for i, name in enumerate(names)},
        }
    tiny_bert(**config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def some_texts(n: int = 21) -> tuple[list[str], list[int], torch.Tensor]:
    """Texts of several lengths, labels, and the logits that the model gives each text alone."""
    rows = sequences(tiny_bert(), n)
    ids = [row[: 2 + i % 7] for i, row in enumerate(rows["input_ids"])]
    with torch.no_grad():
        logits = torch.cat(
            [tiny_bert().eval()(torch.tensor([row])).logits for row in ids]
        )
    return [text_of(row) for row in ids], list(rows["label"]), logits


def texts(*rows: str) -> Dataset:
    return Dataset.from_dict(
        {"text": rows, "label": [i % N_LABELS for i in range(len(rows))]}
    )


def labelled(labels: Any, feature: Any = None) -> Dataset:
    features = (
        None
        if feature is None
        else Features({"text": Value("string"), "label": feature})
    )
    return Dataset.from_dict(
        {"text": ["w1 w2"] * len(labels), "label": labels}, features=features
    )


class TestSizes:
    @pytest.mark.parametrize(
        "entry", ["num_hidden_layers", "n_layers", "encoder_layers", "num_labels"]
    )
    @pytest.mark.parametrize("size", [10**9, 10**400, -1])
    def test_a_config_of_a_model_that_cannot_be_built(
        self, entry: str, size: int, model_folder: Path, tmp_path: Path
    ) -> None:
        config = json.loads((model_folder / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, entry: size}))
        words = f"expected .*config.json to hold a valid {entry!r}, got "
        with pytest.raises(InputError, match=words):
            load_classifier(tmp_path)
        with pytest.raises(InputError, match=words):
            find_task(tmp_path)
        with pytest.raises(InputError, match=words):
            hf_calib.pipeline("text-classification", tmp_path)


class TestPredict:
    @pytest.mark.parametrize("batch_size", [1, 4, 100])
    def test_rows_keep_their_order(
        self, batch_size: int, classifier: Classifier
    ) -> None:
        rows, labels, logits = some_texts()
        done: list[tuple[int, int]] = []
        found = predict(
            classifier,
            Dataset.from_dict({"text": rows, "label": labels}),
            batch_size=batch_size,
            on_progress=lambda *step: done.append(step),
        )
        assert found.logits is not None
        assert found.logits.dtype == np.float32
        np.testing.assert_allclose(
            found.logits, logits, rtol=0, atol=1e-5 * float(logits.abs().max())
        )
        np.testing.assert_array_equal(found.labels, labels)
        assert found.class_names == NAMES
        assert sum(step for step, _ in done) == 21
        assert {total for _, total in done} == {21}

    def test_agrees_with_a_pipeline(
        self, classifier: Classifier, model_folder: Path
    ) -> None:
        rows = some_texts(6)[0]
        classify = transformers.pipeline(
            "text-classification", model=str(model_folder), top_k=None
        )
        served = [
            {row["label"]: row["score"] for row in scores} for scores in classify(rows)
        ]
        wanted = [[scores[name] for name in NAMES] for scores in served]
        np.testing.assert_allclose(
            predict(classifier, texts(*rows)).probabilities(), wanted, atol=1e-6
        )

    def test_long_texts_are_cut(self, classifier: Classifier) -> None:
        rows = texts("w1 " * 300, "w1 " * 16, "w1 w1")
        found = predict(classifier, rows).as_logits()
        np.testing.assert_allclose(
            found[0], found[1], atol=1e-5
        )  # the 16 tokens that the model can read
        found = predict(classifier, rows, max_length=2).as_logits()
        np.testing.assert_allclose(found[0], found[2], atol=1e-5)

    def test_roberta_counts_positions_from_behind_the_padding_token(
        self, tmp_path: Path
    ) -> None:
        words = tokenizer()
        size = {**TEXT, "max_position_embeddings": 16 + words.pad_token_id + 1}
        config = transformers.RobertaConfig(
            **size, num_labels=N_LABELS, pad_token_id=words.pad_token_id
        )
        transformers.RobertaForSequenceClassification(config).save_pretrained(tmp_path)
        words.save_pretrained(tmp_path)
        loaded: Any = load_classifier(tmp_path)
        assert loaded.longest == 16
        assert np.isfinite(
            predict(loaded, texts("w1 " * 300, "w1 w1")).as_logits()
        ).all()

    def test_a_decoder_without_a_padding_token(self, tmp_path: Path) -> None:
        config = transformers.GPT2Config(
            vocab_size=64,
            n_embd=16,
            n_layer=1,
            n_head=2,
            n_positions=16,
            num_labels=N_LABELS,
        )
        model = transformers.GPT2ForSequenceClassification(config).eval()
        model.save_pretrained(tmp_path)
        words = tokenizer()
        words.pad_token = None
        words.save_pretrained(tmp_path)
        rows = some_texts(5)[0]
        with torch.no_grad():
            wanted = [
                model(torch.tensor([words(text)["input_ids"]])).logits[0].numpy()
                for text in rows
            ]
        found = predict(load_classifier(tmp_path), texts(*rows)).as_logits()
        np.testing.assert_allclose(found, wanted, atol=1e-6)

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            (
                texts("w1", "", "w2"),
                r"none in 1 of 3 rows \(first in row 1\); remove these rows",
            ),
            (
                texts("w1 w2 w3 w4", "der Hund bellt laut", "und wie"),
                "be known to the tokenizer, got 6 unknown ones of 10; save the",
            ),
            (
                texts("[PAD] [PAD]"),
                "be known to the tokenizer, got special tokens only",
            ),
        ],
    )
    def test_texts_that_the_tokenizer_does_not_know(
        self, rows: Dataset, message: str, classifier: Classifier
    ) -> None:
        assert (
            len(predict(classifier, texts("w1 w2 w3 w4", "der Hund bellt laut"))) == 2
        )  # half of them
        with pytest.raises(ValueError, match=message):
            predict(classifier, rows)

    def test_a_tokenizer_of_another_model(self, tmp_path: Path) -> None:
        message = "token ids to be below the model's 40, got 55; save the tokenizer"
        with pytest.raises(ValueError, match=message):
            predict(load_classifier(saved(tmp_path, vocab_size=40)), texts("w1 w50"))


class TestLabels:
    @pytest.mark.parametrize(
        "rows",
        [
            labelled([3, 0, 1]),
            labelled([3.0, 0.0, 1.0]),
            labelled(["Sport", "ART", "law"]),
            labelled(
                [1, 0, 2], ClassLabel(names=["art", "sport", "law"])
            ),  # another order than the model's
        ],
        ids=["numbers", "floats", "names", "ClassLabel"],
    )
    def test_mean_the_models_classes(
        self, rows: Dataset, classifier: Classifier
    ) -> None:
        np.testing.assert_array_equal(predict(classifier, rows).labels, [3, 0, 1])

    def test_of_other_names(self, classifier: Classifier) -> None:
        names = ["Kunst", "Recht", "NA", "Sport"]
        found = predict(classifier, labelled(["Sport", "Kunst"]), class_names=names)
        np.testing.assert_array_equal(found.labels, [3, 0])

    @pytest.mark.parametrize(
        ("names", "labels", "ids", "class_names"),
        [
            ("1234", [3, 1, 2], [2, 0, 1], None),
            ("1234", [3, 1, 2], [2, 0, 1], ["1", "2", "3", "4"]),
            (("-1", "0", "1", "2"), [0, -1, 2], [1, 0, 3], None),
            (("1.0", "2.0", "3.0", "4.0"), [3.0, 1.0, 2.0], [2, 0, 1], None),
            (("3.0", "2.0", "1.0", "0.0"), [0, 1, 3], [3, 2, 0], None),
            (("3.0", "2.0", "1.0", "0.0"), ["0", "1", "3"], [3, 2, 0], None),
            (("false", "true", "a", "b"), [True, False], [1, 0], None),
            (("us", "US", "it", "IT"), ["US", "us", "IT"], [1, 0, 3], None),
        ],
    )
    def test_names_that_look_like_something_else(
        self,
        names: Any,
        labels: Any,
        ids: list[int],
        class_names: list[str] | None,
        tmp_path: Path,
    ) -> None:
        loaded = load_classifier(saved(tmp_path, names))
        np.testing.assert_array_equal(
            predict(loaded, labelled(labels), class_names=class_names).labels, ids
        )

    def test_names_of_a_model_without_them_are_in_its_config(
        self, tmp_path: Path
    ) -> None:
        loaded = load_classifier(saved(tmp_path), class_names=NAMES)
        config = loaded.model.config
        assert loaded.class_names == NAMES
        assert config.id2label == dict(enumerate(NAMES))
        assert config.label2id == {name: i for i, name in enumerate(NAMES)}

    @pytest.mark.parametrize("given", ["abcd", {"a": 0}, b"abcd"])
    def test_are_named_by_a_list(self, given: Any) -> None:
        """The folder of the model is not looked for."""
        with pytest.raises(TypeError, match="class_names to be a list, got "):
            load_classifier("nowhere", class_names=given)

    def test_a_model_without_names_takes_numbers(self, tmp_path: Path) -> None:
        rows = labelled([2, 0], ClassLabel(names=["x", "y", "z"]))
        np.testing.assert_array_equal(
            predict(load_classifier(saved(tmp_path)), rows).labels, [2, 0]
        )

    @pytest.mark.parametrize(
        ("rows", "options", "message"),
        [
            (
                labelled(["art", "music", "film"]),
                {},
                r"\(art, law, NA, sport\), got 'music' in row 1; give the",
            ),
            (
                labelled([True, False]),
                {},
                "hold the model's classes .*got 'true' in row 0; give the data's",
            ),
            (labelled(["art", " "]), {}, "a label in every row, got none in row 1"),
            (
                labelled(["art", "law\u00a0"]),
                {},
                r"'law\\xa0' and 'law' differ only by spaces",
            ),
            (labelled([0, 4]), {}, "hold ids in 0..3, got 4 in row 1;"),
            (
                labelled([0, -1], ClassLabel(names=NAMES)),
                {},
                "be labelled, got -1; choose a split",
            ),
            (
                labelled([0, None]),
                {},
                r"have a value in every row, got 1 without \(first in row 1\)",
            ),
            (labelled([0.5, 1.0]), {}, "hold class names or ids, got 0.5 in row 0"),
            (labelled([[0], [1]]), {}, "hold one class in each row, got list"),
            (
                labelled([0]),
                {"label_column": "lable"},
                "label_column to be one of text, label, .*mean",
            ),
            (
                labelled([0]),
                {"text_column": "texts"},
                "text_column to be one of text, label, .*mean",
            ),
            *(
                (
                    labelled(["art"]),
                    {name: "label"},
                    f"{name} to be another column than the labels', got 'label'",
                )
                for name in ("text_column", "text_pair_column")
            ),
            (
                labelled([0]),
                {"class_names": ["a"]},
                "name the model's 4 classes .* once each, got a",
            ),
            (
                labelled([0]),
                {"class_names": ["a"] * 4},
                "class_names to be different texts, got a",
            ),
            *(
                (
                    labelled(given),
                    {"class_names": ["sport", "art", "law", "NA"]},
                    r"the order of the classes \(art, law, NA, sport\), got sport, art, law, NA;",
                )
                for given in ([0, 3], ["art", "sport"])
            ),
            (
                labelled([3]),
                {"class_names": [*"abcd"]},
                "class_names to name the labels of 'label', got numbers",
            ),
            (
                labelled([3.0]),
                {"class_names": [*"abcd"]},
                "class_names to name the labels of 'label', got numbers",
            ),
            (labelled([0]).select([]), {}, "expected data to have rows, got none"),
            (labelled([0]), {"batch_size": 0}, "batch_size to be at least 1, got 0"),
            (
                labelled([0]),
                {"max_length": 0},
                "max_length to be at least 1, got 0",
            ),
        ],
    )
    def test_refused(
        self,
        rows: Dataset,
        options: dict[str, Any],
        message: str,
        classifier: Classifier,
    ) -> None:
        is_type = "one class in each row" in message or "hold texts" in message
        with pytest.raises(TypeError if is_type else ValueError, match=message):
            predict(classifier, rows, **options)


class TestRows:
    def test_of_a_split_of_a_folder(self, tmp_path: Path) -> None:
        for split in ("train", "test"):
            pandas.DataFrame({"text": [split], "label": [0]}).to_csv(
                tmp_path / f"{split}.csv", index=False
            )
        assert load_rows(tmp_path)["text"] == ["test"]
        assert load_rows(tmp_path, split="train")["text"] == ["train"]
        assert load_rows(tmp_path, split=None)["text"] == ["test"]
        with pytest.raises(
            ValueError, match=r"data to have a split 'validation', got .*; name a file"
        ):
            load_rows(tmp_path, split="validation")
        (tmp_path / "test.csv").unlink()
        assert load_rows(tmp_path, split=None)["text"] == ["train"]

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("deep/nothing.parquet", r"to name an existing file, got .*nothing"),
            ("a" * 5000 + ".csv", "to name an existing file, got aaa"),
            (
                "someone/nothing",
                "expected data to have a split 'test', got someone/nothing",
            ),
            ("a" * 5000, "data to have a split 'test', got aaa"),
        ],
    )
    def test_that_are_not_there(self, name: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            load_rows(name)


class TestLoading:
    def test_no_such_model(self, tmp_path: Path) -> None:
        for name in ("someone/nothing", tmp_path, "a" * 5000):
            with pytest.raises(
                ValueError, match=r"the model to be loadable, got .*; name a fine-tuned"
            ) as e:
                load_classifier(name)
            assert "\n" not in str(e.value)

    @pytest.mark.parametrize(
        "damage", ["nothing", "four bytes", "half", "another shape"]
    )
    def test_damaged_weights(
        self, damage: str, model_folder: Path, tmp_path: Path
    ) -> None:
        shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
        weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
        whole = weights.read_bytes()
        sizes = {"nothing": 0, "four bytes": 4, "half": len(whole) // 2}
        weights.write_bytes(whole[: sizes.get(damage, len(whole))])
        if damage == "another shape":
            config.write_text(
                config.read_text().replace(
                    '"intermediate_size": 16', '"intermediate_size": 32'
                )
            )
        with pytest.raises(
            ValueError,
            match=r"to be loadable, got .*; check that its files are complete",
        ):
            load_classifier(tmp_path)

    def test_a_model_without_a_trained_head_or_a_tokenizer(
        self, tmp_path: Path
    ) -> None:
        tiny_bert().save_pretrained(tmp_path)
        message = "come with its tokenizer, got one of 5 tokens, for a model that has 64; save the tokenizer"
        with pytest.raises(ValueError, match=message):
            load_classifier(tmp_path)
        tiny_bert().bert.save_pretrained(tmp_path)
        with pytest.raises(
            ValueError,
            match=r"fine-tuned classifier, got no classifier.bias, classifier.w",
        ):
            load_classifier(tmp_path)

    @pytest.mark.parametrize(
        "config",
        [
            {"problem_type": "multi_label_classification"},
            {"problem_type": "regression"},
            {"num_labels": 1},
        ],
    )
    def test_models_of_other_kinds(
        self, config: dict[str, Any], tmp_path: Path
    ) -> None:
        with pytest.raises(
            ValueError, match="choose one of several classes, got problem_type="
        ):
            load_classifier(saved(tmp_path, **config))

    def test_a_network_of_grey_images(self, tmp_path: Path) -> None:
        """Images are read as RGB, which it cannot take."""
        tiny_vit(num_channels=1).save_pretrained(tmp_path)
        transformers.ViTImageProcessorPil().save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="read three channels, got num_channels=1"):
            load_classifier(tmp_path, "image")

    def test_sixteen_bit_weights_are_read_in_float32(self, tmp_path: Path) -> None:
        saved(tmp_path)
        tiny_bert().bfloat16().save_pretrained(tmp_path)
        assert load_classifier(tmp_path).model.dtype == torch.float32
