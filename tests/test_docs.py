"""The code on the pages in docs runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_calib.export import save_folded
from hf_calib.scaling import TemperatureScaling
from tests.helpers.commands import call
from tests.helpers.places import ROOT
from tests.helpers.reports import quick_reports  # noqa: F401
from tests.helpers.tiny import N_LABELS, sequences, text_of, tiny_bert, tokenizer


@pytest.mark.slow
def test_serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=3, size=(300, N_LABELS))
    labels = (logits / 2 + rng.gumbel(size=logits.shape)).argmax(axis=1)
    scaler, model = TemperatureScaling().fit(logits, labels), tiny_bert()
    save_folded(model, scaler, "calibrated", batch=None, processing_class=tokenizer())
    rows = sequences(model, 60)
    lines = [f"{text_of(row['input_ids'])},{row['label']}" for row in rows]
    (tmp_path / "texts.csv").write_text("\n".join(["text,label", *lines, ""]))
    blocks = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs" / "serving.md").read_text(), flags=re.DOTALL)
    assert [language for language, _ in blocks] == [
        "python",
        "bash",
        "python",
        "bash",
        "bash",
        "python",
        "python",
    ]
    for language, code in blocks:
        if language == "python":
            names: dict[str, Any] = {}
            exec(code, names)
            if "probs" in names:
                np.testing.assert_allclose(np.asarray(names["probs"].tolist()).sum(axis=1), 1, atol=1e-6)
        for line in code.splitlines():
            if language == "bash" and line.startswith("hf-calib"):
                result = call(*shlex.split(line)[1:])
                assert result.exit_code == 0, result.output
