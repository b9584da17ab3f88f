"""A training step of the global-pooling CNN on a CPU: texts grouped by length, against the whole padded batch.

    OMP_NUM_THREADS=1 PYTHONPATH=recipes python benchmarks/word_cnn.py

128 texts with the lengths of 20 Newsgroups (median 160 words, mean 300), cut to the last 200, 400
and 1,000. Processor time of forward and backward, best of 5; "padded" is the network's layers
written with torch's Conv1d and max_pool1d. It prints how far the two gradients differ in float32;
in float64 they agree to 1e-12 (see the tests).
"""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.nn.functional as F
from papers.networks.global_pooling_cnn import (
    GlobalPoolingCNNConfig,
    GlobalPoolingCNNForSequenceClassification,
)
from torch import Tensor, nn


def padded(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    hidden = model.embeddings(input_ids).transpose(1, 2)
    mask = attention_mask.unsqueeze(1).float()
    for number, convolution in enumerate(model.convolutions):
        if number > 0:
            hidden = F.max_pool1d(hidden, 5, stride=1, padding=2)
        hidden = F.relu(convolution(hidden * mask)) * mask
    return model.classifier(F.relu(model.dense(hidden.amax(dim=2))))


def grouped(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    return model(input_ids=input_ids, attention_mask=attention_mask).logits


def main() -> None:
    torch.manual_seed(0)
    config = GlobalPoolingCNNConfig(num_labels=20)
    model = GlobalPoolingCNNForSequenceClassification(config).eval()
    drawn = np.random.default_rng(0).lognormal(np.log(160), 1.0, 128)
    lengths = torch.from_numpy(drawn.astype(int).clip(1))
    print(
        "words  padded ms  grouped ms  ratio  largest difference of a gradient, over the largest gradient"
    )
    for n_words in (200, 400, 1000):
        used = lengths.clamp(max=n_words).unsqueeze(1)
        mask = (torch.arange(n_words) < used).long()
        ids = torch.randint(2, 20_000, mask.shape) * mask
        labels = torch.randint(20, (128,))
        best = {padded: np.inf, grouped: np.inf}
        gradients = {}
        for _ in range(5):
            for form in best:
                model.zero_grad()
                start = time.process_time()
                F.cross_entropy(form(model, ids, mask), labels).backward()
                best[form] = min(best[form], time.process_time() - start)
                own = [p.grad.flatten() for p in model.parameters()]
                gradients[form] = torch.cat(own)
        apart = (gradients[padded] - gradients[grouped]).abs().max()
        difference = apart / gradients[padded].abs().max()
        times = f"{1e3 * best[padded]:9.0f}  {1e3 * best[grouped]:10.0f}"
        ratio = best[padded] / best[grouped]
        print(f"{n_words:5}  {times}  {ratio:5.1f}  {difference:.1e}", flush=True)


if __name__ == "__main__":
    main()
