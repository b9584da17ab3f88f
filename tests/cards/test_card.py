"""Model cards: what a reader and the Hub find in them, from a training and from a folder, honest or not."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
import yaml
from huggingface_hub import EvalResult, ModelCard
from markdown_it import MarkdownIt
from transformers import AutoModelForSequenceClassification

from hf_calib import CalibrationTrainer
from hf_calib._errors import InputValueError
from hf_calib._text import is_hub_name, plain_name
from hf_calib.cards import write_card
from hf_calib.cards.card import _END as END
from hf_calib.cards.card import START, citations, references, repair_stock_card
from hf_calib.decisions import CostRule, Decisions
from hf_calib.losses import LOSSES
from hf_calib.scaling import SCALERS, SplineScaling
from tests.helpers.commands import call, called_for_json
from tests.helpers.hub_server import Hub
from tests.helpers.reports import few_resamples, no_figures, quick_reports  # noqa: F401
from tests.helpers.tiny import sequences, text_of, tiny_bert, tiny_trainer, tokenizer

KEYS = (
    "accuracy",
    "nll",
    "brier",
    "ece",
    "adaptive_ece",
    "classwise_ece",
    "mce",
    "smooth_ece",
)


def card_of(folder: Path) -> ModelCard:
    return ModelCard((folder / "README.md").read_text())


def table(text: str) -> dict[str, list[str]]:
    """The cells of the table of metrics, by its first column."""
    rows = re.findall(
        r"^\| (.+) \|$", text.split("| Metric |")[1].split("\n\n")[0], re.M
    )
    return {cells[0]: cells[1:] for cells in (row.split(" | ") for row in rows[1:])}


def written(folder: Path, **given: Any) -> ModelCard:
    """The card of a folder, written anew."""
    write_card(folder, **({"repo_id": "me/x", "license": "mit"} | given))
    return card_of(folder)


def of_training(trainer: CalibrationTrainer, folder: Path, **given: Any) -> ModelCard:
    """The card that a trainer makes."""
    trainer.create_model_card(license="mit", **given)
    return card_of(folder)


def change(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


# ---- A folder that hf-calib calibrate made, pushed and measured again ----


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its data, and the model calibrated on 150 rows and reported on 120 others."""
    folder = tmp_path_factory.mktemp("work")
    names = {0: "art", 1: "law", 2: "film", 3: "sport"}
    model = tiny_bert(id2label=names, label2id={name: i for i, name in names.items()})
    model.save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    for name, n, seed in (("data", 150, 1), ("test", 120, 2)):
        rows = sequences(model, n, seed=seed)
        texts = [text_of(ids) for ids in rows["input_ids"]]
        pandas.DataFrame(
            {"text": texts, "label": [names[label] for label in rows["label"]]}
        ).to_csv(folder / f"{name}.csv", index=False)
    with pytest.MonkeyPatch.context() as patch:
        few_resamples(patch)
        no_figures(patch)
        data = (
            "--data",
            folder / "data.csv",
            "--test-data",
            folder / "test.csv",
            "--max-length",
            7,
        )
        options = ("--method", "temperature", "--output", folder / "out")
        result = call("calibrate", folder / "model", *data, *options)
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def folder(calibrated: Path, tmp_path: Path) -> Path:
    """What calibrate wrote, without a card."""
    shutil.copytree(
        calibrated / "out", tmp_path / "out", ignore=shutil.ignore_patterns("README.md")
    )
    return tmp_path / "out"


def test_a_pushed_model_measured_again_gives_the_table_of_its_card(
    folder: Path,
    calibrated: Path,
    tmp_path: Path,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache")
    )
    monkeypatch.chdir(calibrated)
    hub.files["me/base"] = {"main": {"README.md": b"---\nlicense: openrail\n---\n"}}
    write_card(folder, repo_id="me/x", base_model="me/base")
    card = card_of(folder)
    assert card.data.license == "openrail"  # the base model's
    command = re.search(r"^hf-calib (evaluate me/x .*)$", card.text, re.M)
    assert command is not None
    assert command[1] == "evaluate me/x --data test.csv --max-length 7"
    files = {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert {
        "README.md",
        "calibration/report.json",
        "calibration/figures/reliability.png",
    } <= set(files)
    hub.files["me/x"] = {
        "main": {name: path.read_bytes() for name, path in files.items()}
    }
    found = called_for_json(*command[1].split())
    rows = table(card.text)
    names = "Accuracy, NLL (nats), Brier score, ECE, Adaptive ECE, Classwise ECE, Maximum CE, Smooth ECE"
    assert ", ".join(rows) == names
    served = [cells[1].split("<br>")[0] for cells in rows.values()]
    assert served == [f"{found['before']['metrics'][key]['value']:.4f}" for key in KEYS]
    assert rows["ECE"][0].split("<br>")[0] != rows["ECE"][1].split("<br>")[0]
    assert '`evaluate` gives the column "After" above, on the same rows.' in card.text


def test_the_card_of_a_calibrated_folder(folder: Path, calibrated: Path) -> None:
    given = {
        "license": "mit",
        "language": "en",
        "datasets": "me/words",
        "base_model": "me/base",
    }
    write_card(folder, repo_id="me/x", **given)
    card = card_of(folder)
    data = card.data.to_dict()
    results = data.pop("model-index")
    assert data == {
        "library_name": "transformers",
        "tags": ["calibration", "hf_calib"],
        "pipeline_tag": "text-classification",
        "license": "mit",
        "language": ["en"],
        "datasets": ["me/words"],
        "base_model": "me/base",
        "base_model_relation": "finetune",
    }
    assert len(results) == 1
    for phrase in (
        "# x\n\nA model for text classification for 4 classes: art, law, film, sport.",
        "on 120 rows of test.csv.",
        "; criterion: nll) was fitted on 150 rows of data.csv",
        "| data.csv | 150 | the calibrator |\n| test.csv | 120 | the numbers above |",
        'import pipeline\nclassify = pipeline("text-classification", model="me/x", top_k=None)',
        "The calibrator is folded into the classification head",
        f"## Calibration\n\n**{json.loads((folder / 'calibration/report.json').read_text())['verdict']}**\n",
        "hf-calib unfold me/x unfolded",
        "of texts that were cut at 7 tokens. `classify(texts, truncation=True, max_length=7)`",
        "@inproceedings{guo2017calibration,",
    ):
        assert phrase in card.text, phrase
    temperature = json.loads((folder / "calibration.json").read_text())["parameters"][
        "temperature"
    ]
    assert f"Temperature scaling (temperature {temperature:.4f}; " in card.text
    assert str(calibrated) not in (folder / "README.md").read_text()


def test_the_hub_reads_the_results_back_before_and_after_apart(folder: Path) -> None:
    card = written(folder)
    report = json.loads((folder / "calibration" / "report.json").read_text())
    found = {each.metric_type: each for each in card.data.eval_results}
    wanted = {
        f"{key}{end}": report[state]["metrics"][key]["value"]
        for key in KEYS
        for state, end in (("after", ""), ("before", "_before_calibration"))
    }
    assert {key: each.metric_value for key, each in found.items()} == wanted
    low, high = found["nll"].metric_args["interval_95"]
    assert low < found["nll"].metric_value < high


def test_writing_it_again_keeps_what_the_user_wrote(folder: Path) -> None:
    write_card(folder, repo_id="me/x", license="mit")
    first = (folder / "README.md").read_text()
    write_card(folder, repo_id="me/x")
    assert (folder / "README.md").read_text() == first
    card = card_of(folder)
    of_the_user = {
        "license": "apache-2.0",
        "pipeline_tag": "zero-shot-classification",
        "widget": [1],
    }
    for key, value in of_the_user.items():
        card.data[key] = value
    card.data.tags = ["mine", *card.data.tags]
    mine = {
        "task_type": "text-classification",
        "dataset_type": "me/other",
        "dataset_name": "other",
    }
    card.data.eval_results.append(
        EvalResult(**mine, metric_type="accuracy", metric_value=0.5)
    )
    card.text = (
        card.text.replace("# x\n", "# x\n\nAbove.\n")
        + "\n## Calibration\n\nMy own words.\n"
    )
    card.save(folder / "README.md")
    change(folder / "calibration.json", criterion="ece")
    write_card(folder, repo_id="me/y")
    again = card_of(folder)
    assert {key: again.data[key] for key in of_the_user} == of_the_user
    assert again.data.tags == ["calibration", "hf_calib", "mine"]
    assert [
        e.metric_value for e in again.data.eval_results if e.dataset_type == "me/other"
    ] == [0.5]
    assert len(again.data.eval_results) == 1 + 2 * len(KEYS)
    assert again.text.count("\n## Calibration\n") == 2
    assert again.text.count("### How to use it") == 1
    assert again.text.endswith("\n## Calibration\n\nMy own words.\n")
    assert "Above." in again.text
    assert "criterion: ece" in again.text
    assert "me/x" not in again.text
    assert 'model="me/y"' in again.text
    write_card(folder, license="bsd")  # what is given replaces what is there
    assert card_of(folder).data.license == "bsd"


def test_the_model_has_the_name_of_its_repository_without_the_owner(
    folder: Path,
) -> None:
    assert written(folder, repo_id="me/x").data.model_name == "x"


def test_a_relation_to_the_base_model_that_is_known_is_kept(folder: Path) -> None:
    relations = []
    for known in ({}, {"base_model_relation": "quantized"}):
        card = ModelCard("---\nlicense: mit\n---\n")
        for name, value in known.items():
            card.data[name] = value
        card.save(folder / "README.md")
        card = written(folder, base_model="bert-base-uncased")
        relations.append(card.data["base_model_relation"])
    assert relations == ["finetune", "quantized"]


def test_the_report_knows_its_rows_better_than_the_training(folder: Path) -> None:
    change(folder / "calibration.json", data={"test": {"split": "test", "n": 7}})
    text = written(folder).text
    assert "| 120 | the numbers above |" in text
    assert "| 7 |" not in text


@pytest.mark.parametrize("is_measured", [True, False])
def test_metrics_with_a_calibrator_stay_if_it_is_that_of_the_model(
    tmp_path: Path, is_measured: bool
) -> None:
    path = tmp_path / "README.md"
    metrics = "- Ece: 0.1\n- Ece Calibrated: 0.05\n- Temperature: 1.5\n"
    path.write_text(f"---\nlicense: mit\n---\n{metrics}- Loss: 1\n")
    repair_stock_card(path, None, is_calibrated=True, is_measured=is_measured)
    kept = metrics if is_measured else "- Ece: 0.1\n"
    assert path.read_text().endswith(f"---\n{kept}- Loss: 1\n")


def test_nothing_is_removed_but_what_stands_between_a_start_and_its_own_end(
    folder: Path,
) -> None:
    file = folder / "README.md"
    write_card(folder)
    first = file.read_text()
    file.write_text(first.replace(END, "") + "\nMy notes.\n")  # an end that was deleted
    with pytest.warns(
        UserWarning, match="has lost its end mark. It was left unchanged, and a new"
    ):
        write_card(folder)
    once = file.read_text()
    write_card(folder)
    assert file.read_text() == once
    assert "My notes." in once
    assert once.count("### How to use it") == 2
    section = first[first.index(START) : first.index(END) + len(END)]
    file.write_text(f"{first}\nBetween.\n\n{section}\n\nAfter: `{END}` ends it.\n")
    write_card(folder)
    found = file.read_text()
    assert found.count("### How to use it") == 1
    assert "Between." in found
    assert f"After: `{END}` ends it." in found


def test_a_model_that_is_not_folded_is_served_as_it_was_before(folder: Path) -> None:
    """The plain names are of what a plain pipeline gives."""
    report = json.loads((folder / "calibration" / "report.json").read_text())
    before, after = (report[key]["metrics"]["ece"] for key in ("before", "after"))
    for folded, named, other in ((True, after, "before"), (False, before, "after")):
        config = json.loads((folder / "config.json").read_text())
        config["calibration"]["folded"] = folded
        change(folder / "config.json", **config)
        change(folder / "calibration.json", folded=folded)
        results = written(folder).data.eval_results
        found = {each.metric_type: each.metric_value for each in results}
        assert found["ece"] == named["value"]
        assert f"ece_{other}_calibration" in found


# ---- Folders that are not what they seem ----

HOSTILE = "<img src=x onerror=alert(1)>](javascript:x)|`x`\n## Owned\n![a](b)"


def test_text_of_calibration_json_is_no_markup(folder: Path) -> None:
    rows = {
        "name": f"\u202e\x1b[2J{HOSTILE}",
        "split": HOSTILE,
        "part": HOSTILE,
        "n": 3,
    }
    entries: dict[str, Any] = {
        **dict.fromkeys(("loss", "split", "base_model", "date"), HOSTILE),
        "loss_kwargs": {HOSTILE: HOSTILE},
        "data": {"train": rows, "calibration": rows, "test": rows},
        "versions": {"torch": HOSTILE, HOSTILE: "1"},
    }
    for known in (
        entries,
        {**entries, "data": None},
    ):  # the split is used where nothing else is known
        change(folder / "calibration.json", **known)
        write_card(folder, repo_id="me/x", license="mit")
        assert_no_markup_of_others(folder)
        assert not {"\u202e", "\x1b"} & set(
            card_of(folder).text
        )  # marks that are not seen


def test_a_calibrator_that_cannot_be_loaded_is_not_described(folder: Path) -> None:
    change(folder / "calibration.json", method=HOSTILE)
    (folder / "calibration" / "report.json").unlink()
    with pytest.warns(UserWarning, match="leaves out .*method to be a scaler"):
        write_card(folder, repo_id="me/x", license="mit")
    assert "Owned" not in card_of(folder).text


def test_text_of_report_config_and_decisions_is_no_markup(folder: Path) -> None:
    names = {str(i): f"{HOSTILE} {i}" for i in range(4)}
    change(folder / "config.json", id2label=names, label2id=None)
    Decisions(CostRule(1 - np.eye(4)), tuple(names.values())).save(folder)
    report = folder / "calibration" / "report.json"
    record = json.loads(report.read_text())
    record["verdict"] = HOSTILE
    record["about"] |= {
        "name": HOSTILE,
        "split": HOSTILE,
        "options": ["--data", "$(x)`\n```\n## Owned"],
    }
    for metric in record["after"]["metrics"].values():
        metric["title"] = HOSTILE
    change(report, **record)
    write_card(folder, repo_id="me/x", license="mit")
    assert_no_markup_of_others(folder)
    assert (
        "\nhf-calib evaluate me/x --data '$(x)` ``` ## Owned'\n" in card_of(folder).text
    )


def assert_no_markup_of_others(folder: Path) -> None:
    card = card_of(folder)
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(card.text)
    assert "<img src=x" not in html
    assert not re.search(r"<h\d>\s*Owned", html)
    assert re.findall(r'<img src="([^"]*)"', html) == [
        "calibration/figures/reliability.png"
    ]
    assert re.findall(r'<a href="([^"]*)"', html) == ["calibration/report.md"]
    assert yaml.safe_load(
        (folder / "README.md").read_text().split("\n---\n")[0].removeprefix("---\n")
    )


@pytest.mark.parametrize(
    "name",
    ["calibration.json", "calibration/report.json", "decisions.json", "config.json"],
)
def test_broken_files_are_warned_of_and_left_out(name: str, folder: Path) -> None:
    for content in ("", "[1, 2]", "{" * 50_000, '{"a": NaN'):
        (folder / name).write_text(content)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            write_card(folder, repo_id="me/x", license="mit")
        assert any("The model card leaves out" in str(each.message) for each in caught)
        assert card_of(folder).data.library_name == "transformers"


@pytest.mark.parametrize(
    ("key", "name", "value"),
    [
        ("ece", "value", 7.0),
        ("ece", "value", -0.5),
        ("ece", "value", True),
        ("ece", "value", "7.0"),
        ("ece", "high", 7.0),
        ("ece", "low", 0.99),
        ("ece", "low", None),
        ("ece", "title", 5),
        ("brier", "value", 2.5),
        ("nll", "value", -1.0),
    ],
)
def test_a_report_with_an_impossible_metric_is_left_out(
    folder: Path, key: str, name: str, value: Any
) -> None:
    path = folder / "calibration/report.json"
    record = json.loads(path.read_text())
    record["after"]["metrics"][key][name] = value
    path.write_text(json.dumps(record))
    with pytest.warns(UserWarning, match="leaves out report.json: .* valid 'after'"):
        card = written(folder)
    assert "7.0" not in card.text


def test_metrics_without_a_report_are_shown(folder: Path) -> None:
    (folder / "calibration/report.json").unlink()
    metrics = {"before": {"ece": 0.1}, "after": {"ece": 0.05}, "n": 20}
    change(folder / "calibration.json", metrics=metrics)
    assert table(written(folder).text)["ECE"] == ["0.1000", "0.0500"]


def test_a_report_on_other_weights_is_not_shown(folder: Path) -> None:
    card = written(folder)
    card.data.eval_results.append(
        EvalResult("text-classification", "glue", "GLUE", "f1", 0.5)
    )
    card.save(folder / "README.md")
    report = folder / "calibration" / "report.json"
    about = json.loads(report.read_text())["about"]
    change(report, about={**about, "fingerprint": "0" * 64})
    with pytest.warns(
        UserWarning,
        match="or another calibrator. Measure these weights: hf-calib calibrate",
    ):
        write_card(folder)
    card = card_of(folder)
    assert "No results are shown" in card.text
    assert "reliability.png" not in card.text
    assert [each.metric_type for each in card.data.eval_results] == ["f1"]


def test_weights_that_were_trained_since_have_no_numbers(folder: Path) -> None:
    """As the stock Trainer saves them, with the config and beside the files of the calibrated model."""
    written(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        model.classifier.weight.mul_(-1)
    model.save_pretrained(folder)
    with pytest.warns(UserWarning, match="which is about other weights"):
        write_card(folder)
    card = card_of(folder)
    assert "Over-confident" not in card.text
    assert not card.data.eval_results
    assert "folded into" not in card.text


def test_decisions_for_other_weights_are_not_shown(folder: Path) -> None:
    known = json.loads((folder / "calibration.json").read_text())["fingerprint"]
    names = ("art", "law", "film", "sport")
    for weights in (None, known):
        Decisions(CostRule(1 - np.eye(4)), names, fingerprint=weights).save(folder)
        assert "A decision rule comes with the model" in written(folder).text
    Decisions(CostRule(1 - np.eye(4)), names, fingerprint="0" * 64).save(folder)
    with pytest.warns(
        UserWarning,
        match=r"probabilities of other weights, .* Run hf-calib decide again",
    ):
        write_card(folder, license="mit")
    assert "A decision rule" not in card_of(folder).text


def test_metadata_that_cannot_be_read_and_a_license_that_is_not_known(
    folder: Path, caplog: Any
) -> None:
    assert "license" not in written(folder, license=None).data.to_dict()
    assert "The model card has no license" in caplog.text
    (folder / "README.md").write_text(text := "---\nlicense: [mit\n---\n# Mine\n")
    with pytest.raises(
        InputValueError,
        match=r"expected README\.md to have metadata that can be read, got",
    ):
        write_card(folder)
    assert (folder / "README.md").read_text() == text


@pytest.mark.parametrize("method", ["temperature", "isotonic"])
def test_the_lines_of_use_run_and_give_the_probabilities_of_the_table(
    method: str, calibrated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    data = (
        "--data",
        calibrated / "data.csv",
        "--test-data",
        calibrated / "test.csv",
        "--method",
        method,
    )
    assert (
        call("calibrate", calibrated / "model", *data, "--output", folder).exit_code
        == 0
    )
    write_card(folder, license="mit")
    text = card_of(folder).text
    snippet = re.search(r"```python\n(.*?)```", text, re.S)
    assert snippet is not None
    monkeypatch.chdir(tmp_path)  # the folder's name stands for the repository's
    found: dict[str, Any] = {}
    exec(snippet[1], found)
    table_of_test = pandas.read_csv(calibrated / "test.csv")
    right = 0.0
    outputs = found["classify"](list(table_of_test["text"]))
    for output, label in zip(outputs, table_of_test["label"], strict=True):
        scores = {each["label"]: each["score"] for each in output}
        right += sum((score - (name == label)) ** 2 for name, score in scores.items())
    brier = table(text)["Brier score"][1].split("<br>")[0]
    assert f"{right / len(table_of_test):.4f}" == brier
    assert ("from hf_calib import pipeline" in text) == (method == "isotonic")


def test_a_model_without_a_map_has_its_own_measurements(
    calibrated: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "plain"
    shutil.copytree(calibrated / "model", folder)
    card = written(folder)
    assert card.data.tags == []
    assert "Calibration" not in card.text
    data = ("--data", calibrated / "test.csv", "--output", folder / "calibration")
    assert call("evaluate", folder, *data).exit_code == 0
    write_card(folder)
    card = card_of(folder)
    assert "| Metric | Value |" in card.text
    assert {each.metric_type for each in card.data.eval_results} == set(KEYS)


def test_names_without_folders_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(map(plain_name, ("../runs/bert", "runs\\data.jsonl", "~/x/", "/"))) == [
        "bert",
        "data.jsonl",
        "x",
        "",
    ]
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("runs/bert")
    (tmp_path / "runs" / "bert").mkdir(parents=True)
    assert not is_hub_name("runs/bert")  # a folder that is here


# ---- After a training ----


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> CalibrationTrainer:
    """A trainer that has trained; see `trainer`."""
    trainer = tiny_trainer(tmp_path_factory.mktemp("once"), loss="focal")
    trainer.train()
    return trainer


@pytest.fixture
def trainer(once: CalibrationTrainer, tmp_path: Path) -> CalibrationTrainer:
    """The same with a folder of the test's own, and the evaluation of a training's end."""
    once.args.output_dir = str(tmp_path)
    once.fit_calibration_map()
    once.evaluate()
    return once


def test_the_card_of_a_training_has_intervals(
    trainer: CalibrationTrainer, tmp_path: Path
) -> None:
    trainer.save_calibrated_model(tmp_path)
    card = of_training(trainer, tmp_path, dataset="words", dataset_tags="me/words")
    last = trainer.last_evaluation.metrics()
    rows = table(card.text)
    interval = r"<br><sub>\d.\d{4}&NoBreak;&ndash;&NoBreak;\d.\d{4}</sub>"
    for title, key in (("ECE", "ece"), ("NLL (nats)", "nll"), ("Accuracy", "accuracy")):
        for cell, end in zip(rows[title], ("", "_calibrated"), strict=True):
            assert re.fullmatch(f"{last[f'eval_{key}{end}']:.4f}{interval}", cell)
    assert "on 24 rows of the evaluation split." in card.text
    splits = "| train | 16 | the weights |\n| calibration | 40 | the calibrator |\n| evaluation | 24 | the"
    assert splits in card.text
    assert "Trained with the loss focal \\(gamma=3.0\\)." in card.text
    found = [each for each in card.data.eval_results if each.metric_type == "accuracy"]
    assert [(each.dataset_type, each.metric_value) for each in found] == [
        ("me/words", pytest.approx(last["eval_accuracy_calibrated"]))
    ]
    assert "on the words dataset." in card.text
    assert str(tmp_path) not in (tmp_path / "README.md").read_text()
    record = json.loads((tmp_path / "calibration.json").read_text())
    report = json.loads((tmp_path / "calibration" / "report.json").read_text())
    assert report["about"] == {
        "split": "evaluation",
        "n": 24,
        "fingerprint": record["fingerprint"],
    }


def test_what_was_measured_on_other_rows_or_with_another_map(
    trainer: CalibrationTrainer, tmp_path: Path
) -> None:
    said = "The calibrator was fitted on these same rows, so the metrics after calibration are optimistic."
    rows = {
        said: trainer.calibration_dataset,
        "on 16 rows of the train split.": trainer.train_dataset,
    }
    for words, dataset in rows.items():
        trainer.evaluate(dataset)
        assert words in of_training(trainer, tmp_path).text
    assert "optimistic" not in card_of(tmp_path).text
    trainer.save_model()
    text = of_training(trainer, tmp_path).text
    assert "The calibrator is not in the weights" in text
    assert "from hf_calib import pipeline" in text
    trainer.fit_calibration_map()
    assert "No results are shown" in of_training(trainer, tmp_path).text


@pytest.mark.slow
def test_saving_another_training_into_the_folder_takes_its_report_away(
    tmp_path: Path,
) -> None:
    trainer = tiny_trainer(tmp_path)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card(license="mit")
    trainer.save_model()  # the same model
    report = tmp_path / "calibration" / "report.json"
    assert report.is_file()
    logits = np.random.default_rng(0).normal(size=(40, 4))
    SplineScaling().fit(logits, logits.argmax(1)).save_pretrained(
        tmp_path
    )  # which does not fold
    other = tiny_trainer(tmp_path, learning_rate=0.1)
    other.train()
    other.save_model()
    assert not report.exists()
    write_card(tmp_path)
    assert "No results are shown" in card_of(tmp_path).text


def test_a_dataset_of_the_hub_has_its_owner_and_a_base_model_on_this_machine_is_not_named(
    tmp_path: Path,
) -> None:
    trainer = tiny_trainer(tmp_path, bf16=True)
    trainer.model.config._name_or_path = "/home/somebody/secret/bert"
    for split in (
        trainer.train_dataset,
        trainer.calibration_dataset,
        trainer.eval_dataset,
    ):
        split.info.dataset_name = split.info.builder_name = "words"
        split.info.download_checksums = {
            "hf://datasets/me/words@abc/data.parquet": {"num_bytes": 1}
        }
    trainer.train()
    card = of_training(trainer, tmp_path)
    assert "somebody" not in card.text
    assert (card.data.base_model, card.data.datasets) == (None, ["me/words"])
    assert "of the evaluation split of me/words." in card.text
    assert (
        "The measurements used bf16 autocast, as the training did; the saved model is"
        in card.text
    )


def test_every_loss_and_map_with_a_source_has_its_papers() -> None:
    cited = {name for names, _, _ in references() for name in names.split(", ")}
    # Cross entropy has no source, the study that logit_norm is from no author in print.
    assert {*LOSSES, *SCALERS} - cited == {"cross_entropy", "logit_norm"}
    assert cited <= {*LOSSES, *SCALERS}
    for name in cited & set(LOSSES):  # the table of losses names the same years
        years = {re.findall(r"\d{4}", entry)[0] for entry in citations(name)}
        assert set(re.findall(r"\d{4}", LOSSES[name].source)) <= years | {
            "2017" if name == "focal" else ""
        }
    assert citations(None, "unheard_of") == []
    assert len(citations("ada_dual_focal", "auto")) == 4
    keys = "".join(
        entry.splitlines()[0].split("{")[1]
        for entry in citations("focal", "temperature")
    )
    assert keys == "lin2017focal,mukhoti2020calibrating,guo2017calibration,"
