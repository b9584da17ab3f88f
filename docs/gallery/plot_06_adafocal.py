"""
How AdaFocal's gammas change
============================

AdaFocal has a gamma for each confidence bin. The gamma grows if the held-out predictions in its bin are
over-confident, and falls if they are under-confident. A bin whose gamma falls far enough uses the inverse focal loss.
"""

import tempfile

from papers.words import train_word_tokenizer  # in the folder recipes
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    set_seed,
)

from hf_calib import CalibrationTrainer, CalibrationTrainingArguments
from hf_calib.data import docstring_dataset, label_maps
from hf_calib.plots import gamma_dynamics

# %%
# A tiny BERT is trained from scratch. The gammas are updated every 10 steps from the calibration rows.

set_seed(0)
dataset = docstring_dataset(max_per_class=300)
tokenizer = train_word_tokenizer(
    dataset["train"]["text"], vocab_size=2000, max_length=32
)
rows = dataset.map(
    lambda batch: tokenizer(batch["text"], truncation=True, max_length=32), batched=True
)
config = BertConfig(
    vocab_size=len(tokenizer),
    hidden_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=64,
    pad_token_id=tokenizer.pad_token_id,
    **label_maps(dataset),
)
with tempfile.TemporaryDirectory() as folder:
    args = CalibrationTrainingArguments(
        folder,
        loss="adafocal",
        loss_kwargs={"n_bins": 5},
        gamma_update_steps=10,
        num_train_epochs=8,
        learning_rate=2e-3,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=256,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = CalibrationTrainer(
        BertForSequenceClassification(config),
        args,
        train_dataset=rows["train"],
        calibration_dataset=rows["calibration"],
        processing_class=tokenizer,
    )
    trainer.remove_callback(
        PrinterCallback
    )  # The log is still in trainer.state.log_history.
    trainer.train()
figure = gamma_dynamics(
    trainer.state.log_history, title="Gaps, gammas and bins of AdaFocal"
)
