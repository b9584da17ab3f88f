"""decisions.json: saved whole, checked on load, from a folder or the Hub, and applied to a pipeline's output."""

from __future__ import annotations

import json
import time
import tracemalloc
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax
from transformers import pipeline

from hf_calib._errors import InputTypeError, InputValueError
from hf_calib.decisions import (
    AbstainRule,
    CostRule,
    Decisions,
    LabelThresholds,
    PredictionSets,
)
from hf_calib.decisions.rules import TopLabelRule
from hf_calib.metrics.sums import Interval
from tests.helpers.sampled import labels_by
from tests.helpers.tiny import sequences, text_of, tiny_bert, tokenizer

NAMES = ("art", "law", "film", "sport")


def drawn(n: int = 600) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    probs = softmax(3 * rng.standard_normal((n, 4)), axis=1)
    return probs, labels_by(probs, rng)


PROBS, LABELS = drawn()
RULES = {
    "abstain": AbstainRule(accuracy=0.8).fit(PROBS, LABELS),
    "costs": CostRule(np.hstack([1 - np.eye(4), np.full((4, 1), 0.3)])),
    "sets": PredictionSets(method="aps", alpha=0.2, by_class=True).fit(PROBS, LABELS),
    "labels": LabelThresholds(costs=(1, 2)).fit(PROBS, np.eye(4)[LABELS]),
}


@pytest.mark.parametrize("kind", RULES)
def test_what_is_saved_decides_the_same(kind: str, tmp_path: Path) -> None:
    rule = RULES[kind]
    measured = {} if kind == "labels" else rule.measure(PROBS, LABELS)
    decisions = Decisions(rule, NAMES, measured, 500, fingerprint="0a" * 32)
    decisions.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["decisions.json"]
    loaded = Decisions.from_pretrained(tmp_path)
    assert loaded.fingerprint == "0a" * 32
    assert type(loaded.rule) is type(rule)
    assert loaded.rule.options() == rule.options()
    assert (loaded.class_names, loaded.measured, loaded.n_measured) == (
        NAMES,
        measured,
        500,
    )
    np.testing.assert_array_equal(loaded.rule.predict(PROBS), rule.predict(PROBS))
    assert loaded.to_dict() == decisions.to_dict()


def test_names_of_what_is_decided() -> None:
    decided = Decisions(RULES["abstain"], NAMES)(PROBS)
    numbers = RULES["abstain"].predict(PROBS)
    assert decided == [None if c < 0 else NAMES[c] for c in numbers]
    assert None in decided
    sets = Decisions(RULES["sets"], NAMES)(torch.tensor(PROBS))
    assert sets == [
        [NAMES[c] for c in np.flatnonzero(row)] for row in RULES["sets"].predict(PROBS)
    ]
    labels = LabelThresholds()
    labels.thresholds_ = np.array([0.5, 0.3, 0.5, 0.9])
    scores = {
        "sport": 0.8,
        "law": 0.4,
        "art": 0.7,
        "film": 0.1,
    }  # they need not sum to 1
    output = [[{"label": name, "score": score} for name, score in scores.items()]]
    assert Decisions(labels, NAMES)(output) == [["art", "law"]]


@pytest.fixture(scope="module")
def classify(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """A pipeline, its model, and its folder."""
    folder = tmp_path_factory.mktemp("model")
    names = dict(enumerate(NAMES))
    model = tiny_bert(id2label=names, label2id={name: i for i, name in names.items()})
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return (
        pipeline("text-classification", model=str(folder), device="cpu"),
        model,
        folder,
    )


def test_one_line_for_a_pipeline(classify: Any) -> None:
    pipe, model, folder = classify
    Decisions(RULES["abstain"], NAMES).save(folder)
    rows = sequences(model, 40)
    texts = [text_of(ids) for ids in rows["input_ids"]]
    decisions = Decisions.from_pretrained(folder)
    with torch.no_grad():
        probs = model(input_ids=torch.tensor(rows["input_ids"])).logits.softmax(1)
    assert decisions(pipe(texts, top_k=None)) == decisions(probs)
    assert decisions(tuple(pipe(texts, top_k=None))) == decisions(probs)
    assert decisions(pipe(texts[0], top_k=None)) == decisions(probs[:1])
    assert decisions(pipe(texts[:1], top_k=None)) == decisions(probs[:1])


def test_a_pipeline_that_gives_the_best_class_only(classify: Any) -> None:
    pipe, _, _ = classify
    message = r"outputs to score each of the model's 4 classes \(art, law, film, sport\), got 1 .*top_k=None"
    with pytest.raises(InputValueError, match=message):
        Decisions(RULES["abstain"], NAMES)(pipe(["w1 w2"]))


@pytest.mark.parametrize("score", [None, "0.5", True, [0.5]])
def test_scores_that_are_no_numbers(score: Any) -> None:
    output = [[{"label": name, "score": score} for name in NAMES]]
    message = "expected the score of art for text 0 to be a number, got"
    with pytest.raises(InputTypeError, match=message):
        Decisions(RULES["abstain"], NAMES)(output)


@pytest.mark.parametrize("label", [None, 3, ["art"], {}])
def test_labels_that_are_no_names(label: Any) -> None:
    output = [[{"label": label, "score": 0.5}, {"label": "art", "score": 0.5}]]
    with pytest.raises(InputValueError, match="score each of the model's 4 classes"):
        Decisions(RULES["abstain"], NAMES)(output)


def test_a_model_of_other_classes(classify: Any) -> None:
    _, _, folder = classify
    Decisions(RULES["abstain"], ("law", "art", "film", "sport")).save(folder)
    message = r"decisions to be those of config.json \(art, law.* got law, art.*; fit the rule again"
    with pytest.raises(InputValueError, match=message):
        Decisions.from_pretrained(folder)


def test_the_names_of_more_than_ten_classes_are_in_the_order_of_their_ids(
    tmp_path: Path,
) -> None:
    names = tuple(f"class {c}" for c in range(11))
    config = {"id2label": {str(c): names[c] for c in sorted(range(11), key=str)}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    Decisions(CostRule(1 - np.eye(11)), names).save(tmp_path)
    assert Decisions.from_pretrained(tmp_path).class_names == names


RECORD = Decisions(RULES["abstain"], NAMES).to_dict()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"version": 2},
            "got the rule 'abstain' of version 2; save them with .* this version reads version 1",
        ),
        ({"rule": "oracle"}, "decisions.json to hold decisions, got the rule 'oracle'"),
        (
            {"options": {**RECORD["options"], "accuracy": 2}},
            r"accuracy to lie in \(0, 1\), got 2",
        ),
        ({"options": {}}, "options to be those of the rule, got other fields: accura"),
        ({"fitted": {}}, "fitted to be those of the rule, got other fields: thresh"),
        ({"class_names": [], "fitted": {"thresholds_": []}}, "2 classes"),
        (
            {"fitted": {"thresholds_": [0.5, 0.5]}},
            "expected class_names to be 2 different names",
        ),
        (
            {"fitted": {"thresholds_": [0.5, 0.5, 0.5, 1.5]}},
            "to hold a valid 'fitted', got {'thresholds_'",
        ),
        (
            {"class_names": ["a", "b", "c", "c"]},
            "expected class_names to be 4 different names",
        ),
    ],
)
def test_what_is_no_decisions_file(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "decisions.json").write_text(json.dumps(RECORD | changes))
    with pytest.raises(InputValueError, match=message):
        Decisions.from_pretrained(tmp_path)


FULL = {
    kind: Decisions(
        rule,
        NAMES,
        {} if kind == "labels" else rule.measure(PROBS, LABELS),
        600,
        "0a" * 32,
    ).to_dict()
    for kind, rule in RULES.items()
}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("abstain", {"version": True}),
        ("abstain", {"version": 1.0}),
        ("abstain", {"rule": ["abstain"]}),
        ("abstain", {"options": []}),
        ("abstain", {"options": {"accuracy": "0.9"}}),
        ("abstain", {"options": {"accuracy": True}}),
        ("abstain", {"options": {"gamma": 1}}),
        ("abstain", {"fitted": {"thresholds_": [True, False, True, False]}}),
        ("abstain", {"fitted": {"thresholds_": [0.5, 0.5, 0.5, None]}}),
        ("abstain", {"fitted": {"thresholds_": [[0.5, 0.5, 0.5, 0.5]]}}),
        ("abstain", {"fitted": {"thresholds_": "0.5"}}),
        ("abstain", {"class_names": [1, 2, 3, 4]}),
        ("abstain", {"class_names": "abcd"}),
        ("abstain", {"measured": []}),
        ("abstain", {"measured": {"answered": [0.5, 0.6, 0.4]}}),
        ("abstain", {"measured": {"answered": [1.5, 0.4, 0.6]}}),
        ("abstain", {"measured": {"answered": [0.5, 0.4]}}),
        ("abstain", {"measured": {"answered": [0.5, "0.4", 0.6]}}),
        ("abstain", {"n_measured": -1}),
        ("abstain", {"n_measured": 1.5}),
        ("abstain", {"n_measured": 10**400}),
        ("abstain", {"n_of_fit": "no"}),
        ("abstain", {"n_of_fit": True}),
        ("abstain", {"fingerprint": "0A" * 32}),
        ("abstain", {"fingerprint": 7}),
        ("abstain", {"calibrator": "isotonic"}),
        ("abstain", {"threshold": 0.5}),
        ("abstain", {"fitted": {"thresholds_": [0.5] * 4, "more_": [0]}}),
        ("costs", {"options": {"costs": [[0, 1], [1, 10**400]]}}),
        ("costs", {"options": {"costs": [[0, 1e13], [1, 0]]}}),
        ("costs", {"measured": {"cost": [0.5, 0.4, 0.6]}}),
        ("labels", {"fitted": {"thresholds_": [0.5] * 4, "pooled_": [0, 1, 2, 3]}}),
        ("labels", {"options": FULL["labels"]["options"] | {"costs": [1, "2"]}}),
        ("labels", {"options": FULL["labels"]["options"] | {"precision": 0.9}}),
        ("labels", {"options": FULL["labels"]["options"] | {"delta": 7}}),
    ],
)
def test_fields_of_wrong_types_or_ranges(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "decisions.json").write_text(json.dumps(FULL[kind] | changes))
    with pytest.raises(
        InputValueError, match=r"decisions\.json to hold decisions"
    ) as found:
        Decisions.from_pretrained(tmp_path)
    assert len(str(found.value).splitlines()) == 1


@pytest.mark.parametrize("kind", FULL)
@pytest.mark.parametrize("empty", [{}, [], "", None])
def test_no_field_may_be_empty(kind: str, empty: Any) -> None:
    may_be_empty = {"measured": {}}
    if kind == "costs":
        may_be_empty["fitted"] = {}
    for name in FULL[kind]:
        may_be_null = name in ("fingerprint", "calibrator")
        is_allowed = name in may_be_empty and may_be_empty[name] == empty
        if is_allowed or (may_be_null and empty is None):
            Decisions.from_dict({**FULL[kind], name: empty})
            continue
        with pytest.raises(InputValueError, match=r"to hold decisions, got .*; save"):
            Decisions.from_dict({**FULL[kind], name: empty})
    for name in FULL[kind]["options"]:
        options = dict(FULL[kind]["options"])
        # Without its costs this is a rule for F1, which has no option that must be given.
        is_other_rule = kind == "labels" and name == "costs" and empty is None
        if options.pop(name) == empty or is_other_rule:
            continue
        for changed in (options, {**options, name: empty}):
            with pytest.raises(InputValueError, match="to hold decisions, got "):
                Decisions.from_dict({**FULL[kind], "options": changed})


def test_a_config_with_an_infinite_number(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')
    Decisions(RULES["abstain"], NAMES).save(tmp_path)
    assert Decisions.from_pretrained(tmp_path).class_names == NAMES


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([1e308, -1e-320, 10**400, "NaN"]),
    lambda each: (
        st.lists(each, max_size=4)
        | st.dictionaries(st.text(max_size=9), each, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_a_damaged_file_is_one_error_or_still_decides(data: st.DataObject) -> None:
    record = deepcopy(FULL[data.draw(st.sampled_from(sorted(FULL)))])
    place: Any = record
    key = data.draw(st.sampled_from(sorted(record)))
    while (
        isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans())
    ):
        place = place[key]
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        key = data.draw(st.sampled_from(keys))
    place[key] = data.draw(JSON)
    try:
        decisions = Decisions.from_dict(record)
    except InputValueError as error:
        said = str(error)
    else:
        said = ""
    if said:
        assert said.startswith("expected decisions.json to hold decisions, got ")
        assert len(said) < 1_000
        return
    assert decisions.rule.predict(PROBS[:20]).shape[0] == 20
    assert decisions.sentence().endswith(".")
    again = Decisions.from_dict(
        json.loads(json.dumps(decisions.to_dict(), allow_nan=False))
    )
    assert again.to_dict() == decisions.to_dict()


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        '{"version": 1, "rule": "abstain", "options": ' + "[" * 900 + "]" * 900 + "}",
        json.dumps(FULL["abstain"]).replace("0.8", "NaN"),
        json.dumps(FULL["abstain"])[:-1] + ', "more": [' + "{}," * 1_300_000 + "0]}",
        pytest.param(
            json.dumps(FULL["abstain"] | {"class_names": ["ab"] * 600_000}),
            marks=pytest.mark.slow,
        ),
        json.dumps(FULL["abstain"]).replace("600", "6" * 5_000),
        json.dumps(FULL["abstain"] | {"rule": "x" * 3_000_000}),
        "[" + "0.1," * 8_000_000 + "0]",
        "null",
    ],
    ids=[
        "nested",
        "nested options",
        "NaN",
        "objects",
        "names",
        "digits",
        "text",
        "size",
        "null",
    ],
)
def test_hostile_files_end_soon_and_in_little_memory(text: str, tmp_path: Path) -> None:
    (tmp_path / "decisions.json").write_text(text)
    size = len(text)
    del text
    start = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(InputValueError) as found:
            Decisions.from_pretrained(tmp_path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(str(found.value).splitlines()) == 1
    assert len(str(found.value)) < 1_000
    assert most < 100e6, size
    assert time.process_time() - start < 3  # below 1 without the tracing of memory


def test_a_config_that_names_no_classes(tmp_path: Path) -> None:
    Decisions(RULES["abstain"], NAMES).save(tmp_path)
    for config in ('{"id2label": ["art"]}', '{"id2label": {"a": "art"}}', "[]", "{"):
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(InputValueError, match="the decisions to be loadable"):
            Decisions.from_pretrained(tmp_path)


def test_files_that_are_not_there_or_broken(tmp_path: Path) -> None:
    for name, content, message in (
        (tmp_path, None, r"be loadable, got .* \(no decisions.json in it"),
        (
            tmp_path,
            '{"version": 1,',
            r"be loadable, got .* JSONDecodeError: Expecting prop",
        ),
        ("no/such/model", None, "be loadable, got no/such/model"),
    ):
        if content is not None:
            (tmp_path / "decisions.json").write_text(content)
        with pytest.raises(InputValueError, match=message):
            Decisions.from_pretrained(name)


def test_a_rule_that_is_not_fitted_or_has_other_classes() -> None:
    with pytest.raises(InputValueError, match="expected AbstainRule to be fitted"):
        Decisions(AbstainRule(), NAMES)
    with pytest.raises(
        InputValueError, match="expected class_names to be 4 different names, got art"
    ):
        Decisions(RULES["abstain"], ("art",))
    for names in (None, ("", *NAMES[1:])):
        with pytest.raises(InputValueError, match="to be 4 different names, got"):
            Decisions(RULES["abstain"], names)  # type: ignore[arg-type]
    with pytest.raises(InputTypeError, match="expected class_names to be a list, got"):
        Decisions(RULES["abstain"], "abcd")  # type: ignore[arg-type]
    with pytest.raises(InputTypeError, match="expected rule to be fitted, got str"):
        Decisions("abstain", NAMES)  # type: ignore[arg-type]


def test_sentences() -> None:
    answers = {
        "answered": Interval(0.812, 0.8, 0.82),
        "accuracy": Interval(0.9613, 0.95, 0.97),
    }
    assert Decisions(RULES["abstain"], NAMES, answers, 1000).sentence() == (
        "It answers 81% of inputs at 80% accuracy and abstains on the rest (96.1% of its answers were correct, on "
        "1,000 rows not used for the fit)."
    )
    for n_of_fit, rows in ((1000, " of the fit)."), (1, ", 1 of them from the fit).")):
        mixed = Decisions(RULES["abstain"], NAMES, answers, 1000, n_of_fit=n_of_fit)
        assert mixed.sentence().endswith(f"on 1,000 rows{rows}")
    assert Decisions(RULES["abstain"], NAMES).sentence() == (
        "It answers inputs so that at least 80% of its answers are correct, with 95% confidence."
    )
    assert Decisions(RULES["sets"], NAMES).sentence() == (
        "It gives sets of classes that contain the true class for at least 80% of the inputs of each class."
    )


ROUNDED = {
    "abstain": AbstainRule(accuracy=0.8),
    "abstain by class": AbstainRule(accuracy=0.6, by_class=True),
    "top labels": TopLabelRule(accuracy=0.8),
    "lac": PredictionSets(alpha=0.2),
    "aps": PredictionSets(alpha=0.2, method="aps"),
    "sets by class": PredictionSets(alpha=0.2, by_class=True),
    "f1": LabelThresholds(),
    "costs": LabelThresholds(costs=(1.0, 3.0)),
    "precision": LabelThresholds(precision=0.8),
}


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("steps", [-2, 2])
def test_what_a_server_rounds_changes_no_decision(name: str, steps: int) -> None:
    """A calibrator such as isotonic scaling gives one probability to many rows, which then all cross a threshold."""
    rng = np.random.default_rng(0)
    sure = rng.integers(1, 10, size=2_000) / 10
    labels: Any = (rng.random(2_000) < sure).astype(int)
    probs = np.stack([1 - sure, sure], axis=1).astype(np.float32)
    rule = ROUNDED[name]
    if isinstance(rule, LabelThresholds):
        labels = np.stack([1 - labels, labels], axis=1)
    rule.fit(probs, labels)
    served = probs
    for _ in range(abs(steps)):
        served = np.nextafter(served, np.float32(steps))
    np.testing.assert_array_equal(rule.predict(served), rule.predict(probs))
    assert len(np.unique(rule.predict(probs), axis=0)) > 1
