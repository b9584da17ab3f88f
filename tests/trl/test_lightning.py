"""Lightning trains with our losses as a plain loop does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hf_calib.losses import focal
from tests.helpers.tiny import sequences, tiny_bert

lightning = pytest.importorskip(
    "pytorch_lightning", reason="Lightning has an environment of its own: make test-trainers"
)


@pytest.mark.filterwarnings("ignore")  # of Lightning's own: workers, few batches
def test_as_a_plain_loop() -> None:
    class Classifier(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model, self.loss = model, focal(gamma=2.0)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            ids, labels = batch
            return self.loss(self.model(input_ids=ids).logits, labels)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    model = tiny_bert().eval()
    rows = sequences(model, 16)
    data = torch.utils.data.TensorDataset(torch.tensor(rows["input_ids"]), torch.tensor(rows["label"]))
    batches = torch.utils.data.DataLoader(data, batch_size=4)
    own = copy.deepcopy(model).double()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    module = Classifier(model.double())
    lightning.Trainer(max_epochs=1, accelerator="cpu", enable_model_summary=False, **quiet).fit(
        module, batches
    )
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    for ids, labels in batches:
        log_p = own(input_ids=ids).logits.log_softmax(1)[torch.arange(4), labels]
        (-((1 - log_p.exp()) ** 2) * log_p).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(module.model.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
