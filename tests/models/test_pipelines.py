"""`hf_calib.pipeline`: the scaler beside a model gives the scores; without one it is the plain pipeline."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from huggingface_hub import HfApi
from peft import LoraConfig, get_peft_model
from scipy.special import expit, softmax
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers.pipelines.pt_utils import KeyDataset

import hf_calib
from hf_calib import CalibrationTrainer, fold, scaling
from hf_calib.models.prompts import PromptTemplate
from hf_calib.scaling import Scaler
from hf_calib.scaling.saved_map import MAP_NAME, save_map
from tests.helpers.hub_server import TOKEN, Hub
from tests.helpers.tiny import (
    N_LABELS,
    arguments,
    sequences,
    tagged,
    text_of,
    tiny_bert,
    tokenizer,
)


class Own(transformers.TextClassificationPipeline):
    """A pipeline of a user's own."""


TEXTS = [text_of(ids) for ids in sequences(tiny_bert(), 12, seed=3)["input_ids"]]
TEXTS[1] = TEXTS[1][:8]  # of other lengths: batches are padded
NAMES = [f"LABEL_{i}" for i in range(N_LABELS)]
UNFOLDED = {
    "spline": scaling.SplineScaling(),
    "isotonic": scaling.IsotonicScaling(),
    "histogram": scaling.HistogramBinning(),
    "ensemble_temperature": scaling.EnsembleTemperatureScaling(),
    "dirichlet": scaling.DirichletScaling(),
    "temperature": scaling.TemperatureScaling(),  # beside a model that is not folded
}


@pytest.mark.parametrize(
    ("kind", "task"),
    [("Token", "text-classification"), ("Sequence", "token-classification")],
)
def test_a_folder_of_another_task_is_refused(
    kind: str, task: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path, tiny_bert(kind))
    with pytest.raises(ValueError, match=f"to be trained for {task}, got one for "):
        hf_calib.pipeline(task, folder)


def saved(folder: Path, model: Any, scaler: Scaler | None = None) -> str:
    """A model with its tokenizer, and a scaler beside it."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    if scaler is not None:
        scaler.save_pretrained(folder)
    return str(folder)


def logits_of(model: Any, data: Any) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=torch.tensor(data["input_ids"])).logits.numpy()


def logits_of_texts(model: Any) -> np.ndarray:
    """One by one, as a pipeline runs them."""
    with torch.no_grad():
        rows = [
            model.eval()(**tokenizer()(text, return_tensors="pt")).logits
            for text in TEXTS
        ]
    return torch.cat(rows).float().numpy()


def fitted(scaler: Scaler, model: Any) -> Scaler:
    data = sequences(model, 300)
    return scaler.fit(logits_of(model.eval(), data), np.array(data["label"]))


def serve(model: Any, task: str = "text-classification", **settings: Any) -> Any:
    return hf_calib.pipeline(task, model, **settings)


def as_rows(results: Any) -> np.ndarray:
    """(N, C) from the results with top_k=None, in the order of the classes."""
    rows = [{entry["label"]: entry["score"] for entry in result} for result in results]
    return np.array([[row[name] for name in NAMES] for row in rows])


@pytest.mark.parametrize("method", UNFOLDED)
def test_the_scores_are_the_scalers(method: str, tmp_path: Path) -> None:
    model = tiny_bert()
    scaler = fitted(UNFOLDED[method], model)
    folder = saved(tmp_path, model, scaler)
    classify = hf_calib.pipeline("text-classification", folder)
    assert isinstance(classify, transformers.TextClassificationPipeline)
    assert type(classify.scaler) is type(scaler)
    wanted = scaler.predict_proba(logits_of_texts(model))
    plain = transformers.pipeline("text-classification", folder)
    assert np.abs(as_rows(plain(TEXTS, top_k=None)) - wanted).max() > 0.05
    found = classify(TEXTS, top_k=None)
    np.testing.assert_allclose(as_rows(found), wanted, atol=1e-6)
    for result in found:
        scores = [entry["score"] for entry in result]
        assert scores == sorted(scores, reverse=True)
    # Padding moves the logits by 1e-7, which a steep curve makes more of.
    np.testing.assert_allclose(
        as_rows(classify(TEXTS, top_k=None, batch_size=5)), wanted, atol=1e-4
    )
    first = classify(TEXTS)
    assert [row["label"] for row in first] == [NAMES[k] for k in wanted.argmax(axis=1)]
    np.testing.assert_allclose(
        [row["score"] for row in first], wanted.max(axis=1), atol=1e-6
    )


def test_all_forms_of_input_and_output(tmp_path: Path) -> None:
    """Only the scores differ from the plain pipeline, and the order that they give."""
    model = tiny_bert()
    scaler = fitted(scaling.SplineScaling(), model)
    folder = saved(tmp_path, model, scaler)
    classify = hf_calib.pipeline("text-classification", folder)
    plain = transformers.pipeline("text-classification", folder)
    of_all = classify(TEXTS)
    assert classify(TEXTS[0]) == of_all[:1]
    assert list(classify(text for text in TEXTS)) == of_all
    assert (
        list(classify(KeyDataset(Dataset.from_dict({"text": TEXTS}), "text"))) == of_all
    )
    assert classify({"text": TEXTS[0], "text_pair": TEXTS[2]})["label"] in NAMES
    for settings in (
        {},
        {"top_k": 1},
        {"top_k": 3},
        {"top_k": None},
        {"function_to_apply": "softmax"},
    ):
        ours, theirs = classify(TEXTS, **settings), plain(TEXTS, **settings)
        strip = lambda rows: [  # noqa: E731
            {entry["label"] for entry in row} if isinstance(row, list) else row["label"]
            for row in rows
        ]
        assert strip(ours) == strip(
            theirs
        )  # a spline keeps the predicted class, but for the ranks below
    assert [len(row) for row in classify(TEXTS, top_k=3)] == [3] * len(TEXTS)
    assert serve(folder, pipeline_class=Own)(TEXTS) == of_all


@pytest.mark.parametrize("settings", [{}, {"pipeline_class": Own}, {"top_k": None}])
def test_a_pipeline_goes_to_another_process_as_a_plain_one_does(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_bert()
    scaler = fitted(scaling.SplineScaling(), model)
    model.config.prompt_template = PromptTemplate("w1 {text} w2").to_dict()
    classify = serve(saved(tmp_path, model, scaler), **settings)
    for copied in (pickle.loads(pickle.dumps(classify)), copy.deepcopy(classify)):
        assert type(copied) is type(classify)
        assert copied(TEXTS[:3]) == classify(TEXTS[:3])


def test_without_a_map_or_with_a_folded_one_it_is_the_plain_pipeline(
    tmp_path: Path,
) -> None:
    model = tiny_bert()
    scaler = fitted(scaling.TemperatureScaling(), model)
    saved(tmp_path / "plain", model)
    fold(model, scaler)
    saved(tmp_path / "folded", model)
    save_map(scaler, tmp_path / "folded", {"folded": True})
    saved(
        tmp_path / "pushed", model, scaler
    )  # whose file does not say it, but the config does
    for name in ("plain", "folded", "pushed"):
        folder = str(tmp_path / name)
        ours = hf_calib.pipeline("text-classification", folder, top_k=None)
        theirs = transformers.pipeline("text-classification", folder, top_k=None)
        assert type(ours) is type(theirs) is transformers.TextClassificationPipeline
        assert ours(TEXTS) == theirs(TEXTS)
    assert type(hf_calib.pipeline("text-classification", tmp_path / "plain")) is type(
        theirs
    )


def test_the_config_says_whether_the_map_is_in_the_weights_not_the_file_beside_them(
    tmp_path: Path,
) -> None:
    model = tiny_bert().eval()
    scaler = fitted(scaling.TemperatureScaling(), model)
    wanted = scaler.predict_proba(logits_of_texts(model))
    folder = saved(tmp_path, model)
    save_map(scaler, tmp_path, {"folded": False})
    loaded = fold(
        type(model).from_pretrained(folder), scaler
    )  # in memory, then saved to the same folder
    found = [serve(loaded, tokenizer=tokenizer(), top_k=None)(TEXTS)]
    loaded.save_pretrained(folder)
    found.append(serve(folder, top_k=None)(TEXTS))
    save_map(scaler, tmp_path, {"folded": True})
    model.config.calibration = {"method": "temperature", "folded": False}
    model.save_pretrained(folder)
    found.append(serve(folder, top_k=None)(TEXTS))
    for each in found:
        np.testing.assert_allclose(as_rows(each), wanted, atol=1e-6)


def test_a_map_on_top_of_a_folded_one(tmp_path: Path) -> None:
    model = tiny_bert()
    fold(model, fitted(scaling.TemperatureScaling(), model))
    spline = fitted(scaling.SplineScaling(), model)
    wanted = spline.predict_proba(logits_of_texts(model))
    found = serve(saved(tmp_path, model, spline), top_k=None)(TEXTS)
    np.testing.assert_allclose(as_rows(found), wanted, atol=1e-6)


def test_multi_label_models(tmp_path: Path) -> None:
    model = tiny_bert(problem_type="multi_label_classification")
    data = sequences(model, 300)
    scaler = scaling.PerLabelTemperatureScaling().fit(
        logits_of(model.eval(), data), np.array(data["label"])
    )
    folder = saved(tmp_path, model, scaler)
    logits = logits_of_texts(model)
    classify = hf_calib.pipeline(
        "text-classification", folder, top_k=None, function_to_apply="sigmoid"
    )
    np.testing.assert_allclose(
        as_rows(classify(TEXTS)), expit(logits / scaler.temperatures_), atol=1e-6
    )
    for word in ("softmax", "none"):
        with pytest.raises(
            ValueError,
            match=f"expected function_to_apply to be 'sigmoid', .*got '{word}'",
        ):
            classify(TEXTS, function_to_apply=word)
    fitted(scaling.SplineScaling(), tiny_bert()).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError,
        match="fitted with multi_label=True, as the model's problem_type says",
    ):
        hf_calib.pipeline("text-classification", folder)


def test_one_logit_with_a_sigmoid(tmp_path: Path) -> None:
    model = tiny_bert(num_labels=1)
    logits = logits_of_texts(model)
    scaler = scaling.TemperatureScaling(multi_label=True).fit(
        [[2.0], [2.0], [2.0], [-2.0]], [[1], [1], [0], [0]]
    )
    classify = hf_calib.pipeline("text-classification", saved(tmp_path, model, scaler))
    found = [row["score"] for row in classify(TEXTS)]
    np.testing.assert_allclose(
        found, expit(logits[:, 0] / scaler.temperature_), atol=1e-6
    )


def subword_tokenizer() -> Any:
    """w12 is w, ##1, ##2."""
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "w",
        *(f"##{i}" for i in range(10)),
    ]
    made = Tokenizer(
        WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]"
    )


@pytest.mark.parametrize("aggregation", ["none", "simple", "first", "average", "max"])
def test_tokens(aggregation: str, tmp_path: Path) -> None:
    """Equal to the plain pipeline of a model whose logits are those of the calibrated probabilities."""
    model = tiny_bert("Token")
    data = tagged(model, 60)
    known = np.array(data["labels"]) != -100
    scaler = scaling.IsotonicScaling("joint").fit(
        logits_of(model.eval(), data)[known], np.array(data["labels"])[known]
    )
    folder = saved(tmp_path, model, scaler)
    subword_tokenizer().save_pretrained(folder)
    texts = [text[:11] for text in TEXTS[:3]]
    settings = {"aggregation_strategy": aggregation, "ignore_labels": []}
    found = hf_calib.pipeline("token-classification", folder, **settings)(texts)
    plain = transformers.pipeline("token-classification", folder, **settings)
    forward = plain.model.forward

    def calibrated(**inputs: Any) -> Any:
        outputs = forward(**inputs)
        outputs["logits"] = torch.from_numpy(
            np.log(scaler.predict_proba(outputs["logits"]))
        )
        return outputs

    plain.model.forward = calibrated
    wanted = plain(texts)
    assert [[e["word"] for e in row] for row in found] == [
        [e["word"] for e in row] for row in wanted
    ]
    for ours, theirs in zip(found, wanted, strict=True):
        assert [e.get("entity_group", e.get("entity")) for e in ours] == [
            e.get("entity_group", e.get("entity")) for e in theirs
        ]
        np.testing.assert_allclose(
            [e["score"] for e in ours], [e["score"] for e in theirs], atol=1e-6
        )
    before = transformers.pipeline("token-classification", folder, **settings)(texts)
    assert abs(before[0][0]["score"] - found[0][0]["score"]) > 1e-3


@pytest.mark.parametrize("several", [False, True])
def test_adapters_get_the_classes_of_the_map_beside_them(
    several: bool, tmp_path: Path
) -> None:
    """What `hf-calib push --no-fold` says of a folder with adapters: their head is not of two classes."""
    torch.manual_seed(0)
    problem = "multi_label_classification" if several else "single_label_classification"
    saved(tmp_path / "base", transformers.BertModel(tiny_bert().config))
    names = {0: "a", 1: "b", 2: "c", 3: "d"}
    base = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "base", num_labels=4, id2label=names, problem_type=problem
    )
    config = LoraConfig(
        task_type="SEQ_CLS", target_modules=["query"], init_lora_weights=False
    )
    model = get_peft_model(base, config)
    trainer = CalibrationTrainer(
        model,
        arguments(tmp_path / "out"),
        train_dataset=sequences(tiny_bert(problem_type=problem), 8),
        calibration_dataset=sequences(tiny_bert(problem_type=problem), 100, seed=2),
        processing_class=tokenizer(),
    )
    trainer.fit_temperature()
    trainer.save_model(str(tmp_path / "adapters"))
    classify = hf_calib.pipeline("text-classification", tmp_path / "adapters")
    scores = {row["label"]: row["score"] for row in classify(TEXTS[0], top_k=None)}
    model.eval()
    with torch.no_grad():
        logits = model(**tokenizer()(TEXTS[0], return_tensors="pt")).logits[0].numpy()
    expected = (expit if several else softmax)(logits / trainer.temperature)
    assert [scores[name] for name in "abcd"] == pytest.approx(expected, abs=1e-5)


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    model = tiny_bert()
    folder = saved(tmp_path, model, fitted(scaling.SplineScaling(), model))
    for word in ("none", "sigmoid"):
        with pytest.raises(
            ValueError,
            match="expected function_to_apply to be 'softmax', which the scaler",
        ):
            serve(folder, function_to_apply=word)
    fitted(scaling.SplineScaling(), tiny_bert(num_labels=3)).save_pretrained(folder)
    with pytest.raises(
        ValueError,
        match=r"expected the scaler in .* to be fitted on the model's 4 classes",
    ):
        serve(folder)
    (tmp_path / MAP_NAME).write_text("{")
    with pytest.raises(
        ValueError,
        match=r"calibration.json to hold a fitted calibrator, got a file that",
    ):
        serve(folder)


def test_a_map_that_the_config_speaks_of_is_missed(tmp_path: Path) -> None:
    model = tiny_bert()
    model.config.calibration = {"method": "spline", "folded": False}
    folder = saved(tmp_path, model)
    with pytest.warns(
        UserWarning,
        match=r"its spline calibrator is not in the weights, and calibration.json",
    ):
        classify = hf_calib.pipeline("text-classification", folder)
    assert type(classify) is transformers.TextClassificationPipeline
    fitted(scaling.SplineScaling(), model).save_pretrained(folder)
    assert hf_calib.pipeline("text-classification", folder).scaler


def test_scalers_are_pushed_in_one_commit_and_found_on_the_hub(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(
        "huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache")
    )
    model = tiny_bert()
    spline, isotonic = (
        fitted(scaling.SplineScaling(), model),
        fitted(scaling.IsotonicScaling(), model),
    )
    spline.push_to_hub("me/scaler", token=TOKEN, private=True)
    loaded, logits = (
        scaling.SplineScaling.from_pretrained("me/scaler", token=TOKEN),
        logits_of_texts(model),
    )
    assert np.array_equal(loaded.predict_proba(logits), spline.predict_proba(logits))
    saved(tmp_path / "model", model)
    api = HfApi(token=TOKEN)
    for name in ("model", "plain"):
        api.create_repo(f"me/{name}")
        api.upload_folder(repo_id=f"me/{name}", folder_path=tmp_path / "model")
    api.create_branch("me/model", branch="joint")
    spline.push_to_hub("me/model", token=TOKEN)
    isotonic.push_to_hub("me/model", token=TOKEN, revision="joint")
    for revision, kind in (
        (None, scaling.SplineScaling),
        ("joint", scaling.IsotonicScaling),
    ):
        classify: Any = hf_calib.pipeline(
            "text-classification", "me/model", token=TOKEN, revision=revision
        )
        assert type(classify.scaler) is kind
    plain = hf_calib.pipeline("text-classification", "me/plain", token=TOKEN)
    assert type(plain) is transformers.TextClassificationPipeline
    for name, wanted in (
        ("me/nothing", {}),
        ("me/plain", {}),
        ("me/scaler", {"revision": "nothing"}),
    ):
        with pytest.raises(
            ValueError, match="name to be a folder, or a repository on the Hub, with"
        ) as error:
            Scaler.from_pretrained(name, token=TOKEN, **wanted)
        assert TOKEN not in str(error.value)
    with pytest.raises(
        ValueError, match="to hold a IsotonicScaling, got a SplineScaling"
    ):
        scaling.IsotonicScaling.from_pretrained("me/scaler", token=TOKEN)
    monkeypatch.setattr(
        "huggingface_hub.constants.HF_HUB_OFFLINE", True
    )  # from the cache
    assert (
        type(hf_calib.pipeline("text-classification", "me/model").scaler)
        is scaling.SplineScaling
    )
    commits = [
        path
        for method, path, _ in hub.requests
        if method == "POST" and "/commit/" in path
    ]
    assert commits.count("/api/models/me/scaler/commit/main") == 1
    assert hub.files["me/scaler"]["main"].keys() == {
        ".gitattributes",
        "calibration.json",
    }
    contents = [
        each
        for branches in hub.files.values()
        for files in branches.values()
        for each in files.values()
    ]
    assert not [content for content in contents if TOKEN.encode() in content]
