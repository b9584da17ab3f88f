"""`hf-calib export`: ONNX and torch programs that give the calibrated probabilities, whatever the batch."""

from __future__ import annotations

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
from onnx import numpy_helper
from scipy.special import softmax

from hf_calib.commands import export
from hf_calib.commands.options import Export
from hf_calib.decisions import CostRule, Decisions
from hf_calib.export import programs, save_folded
from hf_calib.scaling import (
    IsotonicScaling,
    TemperatureScaling,
    VectorScaling,
    load_map,
    save_map,
)
from tests.helpers.architectures import build
from tests.helpers.commands import assert_refused, call, called_for_json, names_in
from tests.helpers.reports import quick_reports  # noqa: F401
from tests.helpers.tiny import (
    LENGTH,
    N_LABELS,
    sequences,
    text_of,
    tiny_bert,
    tokenizer,
)
from tests.language_models.models import language_model

NAMES = ("art", "law", "film", "sport")
PROCESSOR = transformers.ViTImageProcessorPil(size={"height": 16, "width": 16})


def fitted(scaler: Any, n_labels: int = N_LABELS) -> Any:
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=2, size=(300, n_labels))
    return scaler.fit(
        2 * logits, (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    )


def named_bert(**config: Any) -> Any:
    return tiny_bert(id2label=dict(enumerate(NAMES)), **config)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Labelled texts; a model with a map folded in, one with a map beside it, and one without any."""
    folder = tmp_path_factory.mktemp("work")
    model = named_bert()
    ids = [
        row[: 2 + row[0] % (LENGTH - 1)] for row in sequences(model, 240)["input_ids"]
    ]
    rows = pandas.DataFrame(
        {"text": map(text_of, ids), "label": [NAMES[i % 4] for i in range(240)]}
    )
    rows.to_csv(folder / "rows.csv", index=False)
    for name in ("bare", "beside"):
        model.save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    save_map(
        fitted(VectorScaling()),
        folder / "beside",
        {"folded": False, "split": "calibration"},
    )
    save_folded(
        model,
        fitted(VectorScaling()),
        folder / "folded",
        batch=None,
        processing_class=tokenizer(),
    )
    for name in ("calibration/report.json", "calibration/head.safetensors"):
        (folder / "folded" / name).write_text("{}")
    Decisions(CostRule(1 - np.eye(4)), NAMES, fingerprint="0" * 64).save(
        folder / "folded"
    )
    return folder


@pytest.fixture(scope="module")
def exported(workplace: Path) -> dict[str, Any]:
    """Output of the command for the folded model's ONNX graph, in the folder graph."""
    words = (
        workplace / "folded",
        workplace / "graph",
        "--data",
        workplace / "rows.csv",
    )
    return called_for_json("export", *words)


@pytest.mark.slow
def test_an_onnx_graph_gives_the_folded_models_probabilities(
    workplace: Path, exported: dict[str, Any]
) -> None:
    output = workplace / "graph"
    texts = pandas.read_csv(workplace / "rows.csv")["text"].tolist()[:20]
    assert 0 < exported["difference"] < 1e-6
    assert exported["n_rows"] == 3 + 1 + 5 + 32
    (note,) = exported["notes"]
    assert "a rule that was fitted on probabilities of other weights" in note
    assert exported["n_bytes"] == (output / "model.onnx").stat().st_size
    assert names_in(output) == {
        *("model.onnx", "config.json", "tokenizer.json", "tokenizer_config.json"),
        *("calibration.json", "decisions.json", "calibration"),
    }
    assert names_in(output / "calibration") == {"report.json"}  # no weights of before
    session = onnxruntime.InferenceSession(output / "model.onnx")
    read = transformers.AutoTokenizer.from_pretrained(output)
    classify = transformers.pipeline(
        "text-classification", str(workplace / "folded"), top_k=None
    )
    scores = [{row["label"]: row["score"] for row in rows} for rows in classify(texts)]
    wanted = np.array([[score[name] for name in NAMES] for score in scores])
    for size in (1, 2, 20):
        batches = [
            read(texts[i : i + size], padding=True, return_tensors="np")
            for i in range(0, 20, size)
        ]
        found = np.concatenate(
            [session.run(["logits"], dict(batch))[0] for batch in batches]
        )
        np.testing.assert_allclose(softmax(found, axis=1), wanted, atol=1e-6)
    inputs = onnx.load(output / "model.onnx").graph.input
    axes = {
        tuple(axis.dim_param for axis in value.type.tensor_type.shape.dim)
        for value in inputs
    }
    assert axes == {("batch", "sequence")}


@pytest.mark.slow
@pytest.mark.usefixtures("exported")
def test_a_wrong_graph_is_caught(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tampered = onnx.load(workplace / "graph" / "model.onnx")
    bias = next(
        value for value in tampered.graph.initializer if value.name == "classifier.bias"
    )
    wrong = numpy_helper.to_array(bias) + np.array([0, 0, 0, 1e-3], dtype=np.float32)
    bias.CopyFrom(numpy_helper.from_array(wrong, bias.name))
    off = "give the model's probabilities within 0.0001, got a difference of 0.000"
    monkeypatch.setattr(
        export, "write_program", lambda _, __, path: onnx.save(tampered, path)
    )
    with pytest.raises(RuntimeError, match=f"expected the exported program to {off}"):
        Export(model=str(workplace / "folded"), output=tmp_path / "out")()
    assert names_in(tmp_path) == set()


@pytest.mark.slow
def test_a_torch_program_has_the_map_beside_the_model_and_needs_no_transformers(
    workplace: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    done = called_for_json("export", workplace / "beside", output, "--format", "torch")
    assert done["difference"] < 1e-6
    assert "folded into the head first" in done["calibration"]
    about = load_map(output).about
    assert (about["folded"], about["split"], about["head"]) == (
        True,
        "calibration",
        ["classifier"],
    )
    program = torch.export.load(output / "model.pt2").module()
    bert = named_bert()
    for shape in ((1, 1), (2, 12), (7, 4)):
        ids = torch.randint(5, 60, shape)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.no_grad():
            found = program(**batch)["logits"]
            wanted = fitted(VectorScaling()).predict_proba(bert(**batch).logits.numpy())
        np.testing.assert_allclose(softmax(found.numpy(), axis=1), wanted, atol=1e-6)


KINDS: dict[str, Callable[[], Any]] = {
    "tokens": lambda: tiny_bert("Token"),
    "vit": lambda: build("ViT", image_size=16),
    "decoder": lambda: build("Qwen3", vocab_size=64),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "form"), [("tokens", "onnx"), ("vit", "torch"), ("decoder", "onnx")]
)
def test_every_kind_with_its_map(kind: str, form: str, tmp_path: Path) -> None:
    model = KINDS[kind]().eval()
    processor: Any = (
        PROCESSOR if model.main_input_name == "pixel_values" else tokenizer()
    )
    scaler = fitted(TemperatureScaling())
    save_folded(
        model, scaler, tmp_path / "model", batch=None, processing_class=processor
    )
    done = Export(model=str(tmp_path / "model"), output=tmp_path / "out", form=form)()
    assert done.record["difference"] < 2e-6
    assert done.notes == []
    if form == "onnx":
        graph = onnx.load(tmp_path / "out" / "model.onnx").graph
        assert [value.name for value in graph.output] == [
            "logits"
        ]  # of a decoder, without its cache


def test_what_is_refused(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saved(name: str, model: Any) -> Path:
        model.save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
        return tmp_path / name

    isotonic = saved("isotonic", tiny_bert())
    save_map(fitted(IsotonicScaling()), isotonic, {"folded": False})
    regression = saved("regression", tiny_bert(num_labels=1, problem_type="regression"))
    rows, bare, out = workplace / "rows.csv", workplace / "bare", tmp_path / "out"
    for words, message in (
        ((bare, out, "--data", tmp_path / "no.csv"), "expected data"),
        (
            (bare, out, "--data", rows, "--text-column", "body"),
            "--text-column to be one of text, label",
        ),
        ((bare, bare), "expected output to be a new or an empty folder"),
        (
            (regression, out),
            "model to be a classifier, got problem_type='regression' and 1 out",
        ),
        (
            (saved("causal", language_model("Llama")), out),
            "model to be a classifier of texts, tokens or",
        ),
        (
            (isotonic, out),
            "got IsotonicScaling; save the scaler with the model .* for hf_calib.pipeline",
        ),
    ):
        assert_refused(call("export", *words), message)
    monkeypatch.setattr(programs, "_PACKAGES", ("onnx", "onnx_of_tomorrow"))
    assert_refused(
        call("export", bare, out),
        r"no onnx_of_tomorrow; pip install 'hf_calib\[onnx\]'",
    )
    assert not out.exists()
