"""20 Newsgroups as tensors, and the global-pooling CNN in a plain training loop, for studies that measure every epoch.

All seeds here have the same rows and differ in initial weights and batches. In `newsgroups_cnn.py`, which uses the
trainer of the library, each seed also draws its own rows.
"""

import options  # noqa: F401  # the path of `papers`
import torch
from papers.networks.global_pooling_cnn import (
    GlobalPoolingCNNConfig,
    GlobalPoolingCNNForSequenceClassification,
)
from papers.newsgroups import StudyDataArguments, load_study_data
from papers.words import train_word_tokenizer
from transformers import set_seed


def load_posts(source, *, rows, test_rows, max_length):
    """Return ids (N, L) and labels (N,) of training and test rows, headers taken off, and the sizes of the network."""
    data = load_study_data(
        StudyDataArguments(
            dataset=source,
            strip_headers=True,
            test_size=0.2,
            max_train_samples=rows,
            max_calibration_samples=1,
            max_test_samples=test_rows,
        )
    )
    tokenizer = train_word_tokenizer(
        data["train"]["text"], vocab_size=10_000, max_length=max_length
    )
    train, test = (
        (
            tokenizer(
                list(split["text"]), truncation=True, padding=True, return_tensors="pt"
            )["input_ids"],
            torch.tensor(split["label"]),
        )
        for split in (data["train"], data["test"])
    )
    n_classes = data["train"].features["label"].num_classes
    return train, test, {"vocab_size": len(tokenizer), "num_labels": n_classes}


def train_by_epoch(ids, labels, sizes, loss, *, seed, epochs, batch_size):
    """Yield the network after each epoch."""
    set_seed(seed)
    model = GlobalPoolingCNNForSequenceClassification(
        GlobalPoolingCNNConfig(embedding_size=64, num_conv_layers=1, **sizes)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        model.train()
        for batch in torch.randperm(len(ids)).split(batch_size):
            optimizer.zero_grad()
            loss(model(ids[batch]).logits, labels[batch]).backward()
            optimizer.step()
        yield model


@torch.inference_mode()
def outputs(model, ids):
    """Logits (N, C), and what enters the classifier (N, H), without dropout."""
    features = []
    hook = model.classifier.register_forward_pre_hook(
        lambda module, inputs: features.append(inputs[0])
    )
    model.eval()
    logits = torch.cat([model(batch).logits for batch in ids.split(256)])
    hook.remove()
    return logits, torch.cat(features)
