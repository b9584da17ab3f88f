"""The papers' image networks: sizes and logits of the authors' code, initial weights, saving, folding, pipelines."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from papers.networks import IMAGE_NETWORKS, network_config
from papers.networks.densenet import DenseNetConfig
from papers.networks.global_pooling_cnn import (
    GlobalPoolingCNNConfig,
    GlobalPoolingCNNForSequenceClassification,
)
from papers.networks.image_classifier import ImageClassifier
from papers.networks.resnet import CifarResNetConfig, WideResNetConfig, _ResidualBlock
from papers.networks.vgg import VGGConfig
from torch import nn
from transformers import AutoModelForImageClassification, PreTrainedConfig

from hf_calib.cards import write_card
from hf_calib.export import fold_temperature
from tests.helpers.places import GOLDEN

pytestmark = pytest.mark.slow

AUTHORS = json.loads((GOLDEN / "image_networks.json").read_text())
TINY_IMAGENET = {"pooled_size": 2, "he_initialization": True}
THEIRS: dict[str, tuple[PreTrainedConfig, int]] = {
    "resnet18": (CifarResNetConfig(depth=18), 32),
    "resnet50": (CifarResNetConfig(depth=50), 32),
    "resnet110": (CifarResNetConfig(depth=110), 32),
    "resnet50_tiny_imagenet": (CifarResNetConfig(depth=50, **TINY_IMAGENET), 64),
    "wide_resnet_26_10": (WideResNetConfig(), 32),
    "densenet121": (DenseNetConfig(), 32),
}


def make(config: PreTrainedConfig, **changes: Any) -> ImageClassifier:
    torch.manual_seed(0)
    for name, value in changes.items():
        setattr(config, name, value)
    return AutoModelForImageClassification.from_config(config).eval()


def fill(model: nn.Module) -> None:
    """Weights and statistics of seed 0, in the order of the layers, which is that of the authors' networks."""
    rng = np.random.default_rng(0)
    filled = {}
    for name, old in model.state_dict().items():
        if name.endswith("num_batches_tracked"):
            filled[name] = old
            continue
        values = rng.standard_normal(tuple(old.shape))
        if name.endswith("running_var"):
            values = 0.5 + np.abs(values)
        elif old.ndim > 1:
            values = values / math.sqrt(old[0].numel())
        else:
            values = 0.1 * values + name.endswith("weight")
        filled[name] = torch.tensor(values)
    model.load_state_dict(filled)


@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        pytest.param("resnet50", marks=pytest.mark.deep),
        pytest.param("resnet110", marks=pytest.mark.deep),
        pytest.param("resnet50_tiny_imagenet", marks=pytest.mark.slow),
        pytest.param("wide_resnet_26_10", marks=pytest.mark.slow),
        "densenet121",
    ],
)
def test_parameters_and_logits_are_those_of_the_authors_network(name: str) -> None:
    config, size = THEIRS[name]
    model = make(config, num_labels=10).double()
    assert (
        sum(weight.numel() for weight in model.parameters())
        == AUTHORS[name]["parameters"]
    )
    fill(model)
    pixels = torch.tensor(np.random.default_rng(1).standard_normal((2, 3, size, size)))
    with torch.no_grad():
        logits = model(pixels).logits
    np.testing.assert_allclose(logits, AUTHORS[name]["logits"], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("config", "n_parameters"),
    [
        (CifarResNetConfig(depth=20), 269_722),  # He et al. 2016, Table 6: 0.27 million
        (CifarResNetConfig(depth=110, block="basic"), 1_727_962),  # 1.7 million
        (DenseNetConfig(stem="large", num_labels=1000), 7_978_856),  # torchvision's
        (
            DenseNetConfig(depth=40),
            1_019_722,
        ),  # Huang et al. 2017, Table 2: 1.0 million
        (VGGConfig(), 14_728_266),
    ],
    ids=[
        "resnet20",
        "resnet110 basic",
        "densenet121 for ImageNet",
        "densenet40",
        "vgg16",
    ],
)
def test_sizes_of_the_other_networks(
    config: PreTrainedConfig, n_parameters: int
) -> None:
    if config.num_labels == 2:
        config.num_labels = 10
    with torch.device("meta"):
        model = IMAGE_NETWORKS[config.model_type](config)
    assert sum(weight.numel() for weight in model.parameters()) == n_parameters


def test_stochastic_depth_skips_blocks_in_training_and_scales_them_in_evaluation() -> (
    None
):
    """A block is skipped in its share of the batches; what evaluation gives is the mean of both, before the ReLU."""
    model = make(CifarResNetConfig(depth=8, stochastic_depth=0.6, num_labels=3))
    blocks = [
        module for module in model.modules() if isinstance(module, _ResidualBlock)
    ]
    assert [block.drop for block in blocks] == pytest.approx([0.2, 0.4, 0.6])
    block, pixels = blocks[-1].requires_grad_(False), torch.rand(2, 32, 8, 8)
    for layer in block.layers:
        if isinstance(layer, nn.BatchNorm2d):
            layer.eval().bias.fill_(1.0)
    skipped = block.shortcut(pixels)
    layers = block.layers(pixels)
    torch.testing.assert_close(block(pixels), (0.4 * layers + skipped).relu())
    block.training = True
    outputs = [block(pixels) for _ in range(300)]
    whole = (layers + skipped).relu()
    n_skipped = sum(torch.equal(output, skipped.relu()) for output in outputs)
    assert n_skipped + sum(torch.equal(output, whole) for output in outputs) == 300
    assert 140 < n_skipped < 220  # binomial of 300 and 0.6: beyond it in 2e-6 of runs


ELSEWHERE = """
import json, sys, torch, transformers
_, auto, folder = sys.argv
model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True)
assert not {"papers", "hf_calib"} & set(sys.modules), "only what is in the folder"
inputs = torch.load(folder + "/inputs.pt", weights_only=True)
print(json.dumps(model(**inputs).logits.tolist()))
"""


@pytest.mark.slow
def test_a_saved_model_carries_its_code(tmp_path: Path) -> None:
    """It is folded, saved, and loaded where neither the recipes nor hf_calib is; the card says how."""
    torch.manual_seed(0)
    auto, inputs = (
        "AutoModelForSequenceClassification",
        {"input_ids": torch.tensor([[7, 3, 9], [5, 1, 0]])},
    )
    config = GlobalPoolingCNNConfig(vocab_size=50, num_labels=3)
    model = GlobalPoolingCNNForSequenceClassification(config).eval()
    before = model(**inputs).logits
    folder = tmp_path / "model"
    fold_temperature(model, 2.5, batch=inputs).save_pretrained(folder)
    assert set(json.loads((folder / "config.json").read_text())["auto_map"]) == {
        "AutoConfig",
        auto,
    }
    torch.save(inputs, folder / "inputs.pt")
    (tmp_path / "elsewhere").mkdir()
    settings = {
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
        "PYTHONPATH": "",
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", ELSEWHERE, auto, str(folder)],
        cwd=tmp_path / "elsewhere",
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.tensor(json.loads(done.stdout)), before / 2.5)
    again = getattr(transformers, auto).from_pretrained(
        folder
    )  # here the class is known
    assert type(again) is type(model)
    write_card(folder, license="mit")
    assert "trust_remote_code=True" in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("make_config", "message"),
    [
        (
            lambda: CifarResNetConfig(depth=51),
            "expected depth with basic blocks to be one of 18, 34 or 6n",
        ),
        (
            lambda: VGGConfig(depth=12),
            "expected depth to be one of 11, 13, 16, 19, got 12",
        ),
        (
            lambda: network_config(VGGConfig, '{"depht": 11}'),
            "to name settings of vgg .*, got 'depht'.*'depth'",
        ),
        (
            lambda: network_config(VGGConfig, "{depth: 11}"),
            "expected model_kwargs to be a JSON object",
        ),
    ],
)
def test_networks_that_there_are_not(make_config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config()
