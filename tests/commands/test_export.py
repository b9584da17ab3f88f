"""`hf-calib export`: ONNX and torch programs that give the calibrated probabilities, whatever the batch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pandas
import pytest
import torch
import transformers
from numpy.typing import NDArray
from onnx import numpy_helper
from scipy.special import expit, softmax

from hf_calib._errors import InputValueError
from hf_calib.commands import export
from hf_calib.commands.options import Export
from hf_calib.export import programs, save_folded
from hf_calib.language_models import PromptTemplate, label_token_classifier
from hf_calib.scaling import (
    IsotonicScaling,
    PerLabelTemperatureScaling,
    TemperatureScaling,
    VectorScaling,
    load_map,
    save_map,
)
from tests.helpers.commands import assert_refused, call, called_for_json, names_in
from tests.helpers.reports import quick_reports  # noqa: F401
from tests.helpers.tiny import LENGTH, N_LABELS, sequences, text_of, tiny_bert, tokenizer
from tests.language_models.models import language_model

NAMES = ("art", "law", "film", "sport")
SIZE = {"height": 16, "width": 16}


def fitted(scaler: Any, *, multi_label: bool = False) -> Any:
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=2, size=(300, N_LABELS))
    if multi_label:
        return scaler.fit(2 * logits, (rng.random(logits.shape) < expit(logits)).astype(int))
    return scaler.fit(2 * logits, (logits + rng.gumbel(size=logits.shape)).argmax(axis=1))


def named_bert(**config: Any) -> Any:
    return tiny_bert(id2label=dict(enumerate(NAMES)), **config)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Labelled texts; a model with a map folded in, one with a map beside it, and one without any."""
    folder = tmp_path_factory.mktemp("work")
    model = named_bert()
    ids = [row[: 2 + row[0] % (LENGTH - 1)] for row in sequences(model, 240)["input_ids"]]
    with torch.no_grad():
        logits = np.concatenate([model(input_ids=torch.tensor([row])).logits.numpy() for row in ids])
    drawn = (logits / 6 + np.random.default_rng(1).gumbel(size=logits.shape)).argmax(axis=1)
    rows = pandas.DataFrame({"text": map(text_of, ids), "label": [NAMES[label] for label in drawn]})
    rows.to_csv(folder / "rows.csv", index=False)
    for name in ("bare", "beside"):
        model.save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    save_map(fitted(VectorScaling()), folder / "beside", {"folded": False, "split": "calibration"})
    save_folded(model, fitted(VectorScaling()), folder / "folded", batch=None, processing_class=tokenizer())
    return folder


@pytest.fixture(scope="module")
def exported(workplace: Path) -> dict[str, Any]:
    """Output of the command for the folded model's ONNX graph, in the folder graph."""
    for name in ("report.json", "head.safetensors"):
        (workplace / "folded" / "calibration").mkdir(exist_ok=True)
        (workplace / "folded" / "calibration" / name).write_text("{}")
    (workplace / "folded" / "decisions.json").write_text("{}")
    return called_for_json(
        "export", workplace / "folded", workplace / "graph", "--data", workplace / "rows.csv"
    )


@pytest.fixture(scope="module")
def graph(exported: dict[str, Any], workplace: Path) -> Path:
    return workplace / "graph" / "model.onnx"


def probabilities(folder: Path, texts: list[str]) -> NDArray[np.float64]:
    """Probabilities of a pipeline of transformers."""
    classify = transformers.pipeline("text-classification", str(folder), top_k=None, device="cpu")
    order = list(classify.model.config.id2label.values())
    scores = [{row["label"]: row["score"] for row in rows} for rows in classify(texts)]
    return np.array([[score[name] for name in order] for score in scores])


def session_of(folder: Path) -> Callable[..., NDArray[np.float32]]:
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    read = transformers.AutoTokenizer.from_pretrained(folder)

    def run(texts: list[str]) -> NDArray[np.float32]:
        batch = read(texts, padding=True, return_tensors="np")
        return session.run(["logits"], dict(batch))[0]

    return run


@pytest.mark.slow
class TestOnnx:
    def test_gives_the_folded_models_probabilities(self, workplace: Path, exported: dict[str, Any]) -> None:
        output = workplace / "graph"
        texts = pandas.read_csv(workplace / "rows.csv")["text"].tolist()
        assert 0 < exported["difference"] < 1e-6
        assert exported["n_rows"] == 3 + 1 + 5 + 32 + 1
        assert exported["notes"] == []
        assert exported["n_bytes"] == (output / "model.onnx").stat().st_size
        assert names_in(output) == {
            *("model.onnx", "config.json", "tokenizer.json", "tokenizer_config.json"),
            *("calibration.json", "decisions.json", "calibration"),
        }
        assert names_in(output / "calibration") == {"report.json"}  # no weights of before
        run = session_of(output)
        wanted = probabilities(workplace / "folded", texts[:20])
        for size in (1, 2, 20):
            found = np.concatenate([run(texts[i : i + size]) for i in range(0, 20, size)])
            np.testing.assert_allclose(softmax(found, axis=1), wanted, atol=1e-6)
        inputs = onnx.load(output / "model.onnx").graph.input
        axes = {tuple(axis.dim_param for axis in value.type.tensor_type.shape.dim) for value in inputs}
        assert axes == {("batch", "sequence")}

    def test_a_wrong_graph_is_caught(
        self, workplace: Path, graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def tampered(model: Any, batch: Any, path: Path) -> None:
            program = onnx.load(graph)
            bias = next(value for value in program.graph.initializer if value.name == "classifier.bias")
            wrong = numpy_helper.to_array(bias) + np.array([0, 0, 0, 1e-3], dtype=np.float32)
            bias.CopyFrom(numpy_helper.from_array(wrong, bias.name))
            onnx.save(program, path)

        def of_one_size(model: Any, batch: Any, path: Path) -> None:
            program = onnx.load(graph)
            program.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 3
            onnx.save(program, path)

        for write, error, message in (
            (
                tampered,
                RuntimeError,
                "give the model's probabilities within 0.0001, got a difference of 0.000",
            ),
            (of_one_size, InputValueError, "load and run on batches of several sizes and lengths, got Inv"),
        ):
            monkeypatch.setattr(export, "write_program", write)
            with pytest.raises(error, match=f"expected the exported program to {message}"):
                Export(model=str(workplace / "folded"), output=tmp_path / "out")()
            assert names_in(tmp_path) == set()


class TestTorch:
    @pytest.mark.slow
    def test_a_map_beside_the_model_is_folded_first(self, workplace: Path, tmp_path: Path) -> None:
        output = tmp_path / "out"
        done = called_for_json("export", workplace / "beside", output, "--format", "torch")
        assert done["difference"] < 1e-6
        assert "folded into the head first" in done["calibration"]
        about = load_map(output).about
        assert (about["folded"], about["split"], about["head"]) == (True, "calibration", ["classifier"])
        program = torch.export.load(output / "model.pt2").module()
        bert = named_bert()
        for shape in ((1, 1), (2, 12), (7, 4)):
            ids = torch.randint(5, 60, shape)
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            with torch.no_grad():
                found = program(**batch)["logits"]
                wanted = fitted(VectorScaling()).predict_proba(bert(**batch).logits.numpy())
            np.testing.assert_allclose(softmax(found.numpy(), axis=1), wanted, atol=1e-6)
        # A server needs no transformers.
        code = """
import sys, torch
program = torch.export.load(sys.argv[1]).module()
ids = torch.ones(2, 3, dtype=torch.long)
assert program(input_ids=ids, attention_mask=ids)["logits"].shape == (2, 4)
assert "transformers" not in sys.modules
"""
        subprocess.run([sys.executable, "-c", code, str(output / "model.pt2")], check=True)

    @pytest.mark.deep
    def test_images(self, tmp_path: Path) -> None:
        image_model("ViT").save_pretrained(tmp_path / "model")
        transformers.ViTImageProcessorPil(size=SIZE).save_pretrained(tmp_path / "model")
        done = Export(model=str(tmp_path / "model"), output=tmp_path / "out", form="torch")()
        assert done.record["n_rows"] == 3 + 1 + 8
        assert "no calibration map" in done.notes[0]
        assert names_in(tmp_path / "out") == {"config.json", "model.pt2", "preprocessor_config.json"}


def image_model(kind: str) -> Any:
    torch.manual_seed(0)
    small: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "patch_size": 8,
    }
    if kind == "ResNet":
        small = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
    config = getattr(transformers, f"{kind}Config")(image_size=16, num_labels=N_LABELS, **small)
    return getattr(transformers, f"{kind}ForImageClassification")(config)


def decoder(**config: Any) -> Any:
    torch.manual_seed(0)
    small = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_labels": N_LABELS}
    settings = transformers.Qwen2Config(**small, **heads, **config)
    return transformers.Qwen2ForSequenceClassification(settings)


def judge(name: str) -> Any:
    options = [f"w{i}" for i in range(50, 50 + N_LABELS)]
    prompt = PromptTemplate("w5 {text} w6")
    return label_token_classifier(language_model(name), tokenizer(), options, prompt=prompt)


KINDS: dict[str, Callable[[], Any]] = {
    "tokens": lambda: tiny_bert("Token"),
    "multi_label": lambda: tiny_bert(problem_type="multi_label_classification"),
    "one_sigmoid": lambda: tiny_bert(num_labels=1, problem_type="multi_label_classification"),
    "vit": lambda: image_model("ViT"),
    "resnet": lambda: image_model("ResNet"),
    "decoder": lambda: decoder(pad_token_id=0),
    "judge": lambda: judge("Llama"),
    "tied": lambda: judge("Qwen2, tied"),
    "gpt2": lambda: judge("GPT2"),
}
OFTEN = {("tokens", "onnx"), ("one_sigmoid", "torch"), ("vit", "torch")}


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        pytest.param(kind, form, marks=pytest.mark.slow if (kind, form) in OFTEN else pytest.mark.deep)
        for kind in KINDS
        for form in ("onnx", "torch")
    ],
)
def test_every_kind_with_its_map(kind: str, form: str, tmp_path: Path) -> None:
    model = KINDS[kind]().eval()
    if model.main_input_name == "pixel_values":
        processor: Any = transformers.ViTImageProcessorPil(size=SIZE)
    else:
        processor = tokenizer()
    save_folded(model, fitted_for(model), tmp_path / "model", batch=None, processing_class=processor)
    done = Export(model=str(tmp_path / "model"), output=tmp_path / "out", form=form)()
    assert done.record["difference"] < 2e-6
    assert done.notes == []
    if form == "onnx":
        graph = onnx.load(tmp_path / "out" / "model.onnx").graph
        assert [value.name for value in graph.output] == ["logits"]  # of a decoder, without its cache


def fitted_for(model: Any) -> Any:
    if model.config.problem_type != "multi_label_classification":
        return fitted(TemperatureScaling())
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(300, model.config.num_labels))
    return PerLabelTemperatureScaling().fit(
        3 * logits, (rng.random(logits.shape) < expit(logits)).astype(int)
    )


class TestRefusals:
    def test_options_and_output(self, workplace: Path, tmp_path: Path) -> None:
        rows, bare = workplace / "rows.csv", workplace / "bare"
        for words, message in (
            (("--data", tmp_path / "no.csv"), "expected data"),
            (("--data", rows, "--text-column", "body"), "expected text_column to be one of text, label"),
        ):
            assert_refused(call("export", bare, tmp_path / "out", *words), message)
        assert_refused(call("export", bare, bare), "expected output to be a new or an empty folder")
        (tmp_path / "file").write_text("")
        assert_refused(call("export", bare, tmp_path / "file"), "expected output to be a folder")
        assert names_in(tmp_path) == {"file"}

    def test_models(self, workplace: Path, tmp_path: Path) -> None:
        def saved(name: str, model: Any) -> str:
            model.save_pretrained(tmp_path / name)
            tokenizer().save_pretrained(tmp_path / name)
            return str(tmp_path / name)

        body = transformers.BertModel(named_bert().config)
        (tmp_path / "lora").mkdir()
        (tmp_path / "lora" / "adapter_config.json").write_text("{}")
        rows = str(workplace / "rows.csv")
        for source, message in (
            (saved("body", body), "be a classifier of sequences, tokens or images, got BertModel"),
            (
                saved("regression", tiny_bert(num_labels=1)),
                "be a classifier, got problem_type=None and 1 out",
            ),
            (saved("decoder", decoder()), "have a padding token, got none"),
            (str(tmp_path / "nothing"), "be loadable"),
            (str(tmp_path / "lora"), "have no adapters beside it"),
        ):
            with pytest.raises(InputValueError, match=f"expected the model to {message}"):
                Export(model=source, output=tmp_path / "out")()
        isotonic = saved("isotonic", tiny_bert())
        save_map(fitted(IsotonicScaling()), isotonic, {"folded": False})
        with pytest.raises(
            InputValueError, match=r"map to fold into its head, got isotonic; serve it with hf_"
        ):
            Export(model=isotonic, output=tmp_path / "out")()
        image_model("ViT").save_pretrained(tmp_path / "image")
        transformers.ViTImageProcessorPil(size=SIZE).save_pretrained(tmp_path / "image")
        with pytest.raises(InputValueError, match="expected data to be given with a model of texts only"):
            Export(model=str(tmp_path / "image"), output=tmp_path / "out", data=rows)()
        assert not (tmp_path / "out").exists()

    def test_a_head_that_was_never_trained(self, workplace: Path, tmp_path: Path) -> None:
        shutil.copytree(workplace / "bare", tmp_path / "model")
        config = json.loads((tmp_path / "model" / "config.json").read_text())
        transformers.BertModel(transformers.BertConfig(**config)).save_pretrained(tmp_path / "model")
        (tmp_path / "model" / "config.json").write_text(json.dumps(config))
        with pytest.raises(InputValueError, match=r"be a fine-tuned classifier, got no classifier\.bias"):
            Export(model=str(tmp_path / "model"), output=tmp_path / "out")()

    def test_without_the_extra(
        self, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(programs, "_PACKAGES", ("onnx", "onnx_of_tomorrow"))
        message = r"no onnx_of_tomorrow; pip install 'hf_calib\[onnx\]'"
        assert_refused(call("export", workplace / "bare", tmp_path / "out"), message)

    @pytest.mark.slow
    def test_what_cannot_be_traced(
        self, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def forward(self: Any, input_ids: torch.Tensor, **inputs: Any) -> Any:
            if input_ids.sum() > 0:  # the graph would depend on the values
                return whole(self, input_ids, **inputs)
            return None

        whole = transformers.BertForSequenceClassification.forward
        monkeypatch.setattr(transformers.BertForSequenceClassification, "forward", forward)
        with pytest.raises(InputValueError, match="expected the model to be exportable by transformers, got"):
            Export(model=str(workplace / "bare"), output=tmp_path / "out", form="torch")()
        assert names_in(tmp_path) == set()
