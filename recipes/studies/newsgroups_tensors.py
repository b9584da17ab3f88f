"""20 Newsgroups as tensors, and the global-pooling CNN in a plain training loop, for studies that measure every epoch.

All seeds here have the same rows and differ in initial weights and batches. In `newsgroups_cnn.py`,
which uses the trainer of the library, each seed also draws its own rows.
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
    """Return training and test rows, ids (N, L) and labels (N,), headers taken off, and the sizes of the network."""
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
    texts = data["train"]["text"]
    tokenizer = train_word_tokenizer(texts, vocab_size=10_000, max_length=max_length)

    def tensors(split):
        encoded = tokenizer(
            list(split["text"]), truncation=True, padding=True, return_tensors="pt"
        )
        return encoded["input_ids"], torch.tensor(split["label"])

    n_classes = data["train"].features["label"].num_classes
    sizes = {"vocab_size": len(tokenizer), "num_labels": n_classes}
    return tensors(data["train"]), tensors(data["test"]), sizes


def train_by_epoch(rows, sizes, loss, *, seed, epochs, batch_size):
    """Yield the network after each epoch."""
    ids, labels = rows
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
def outputs(model, rows):
    """Logits (N, C), and what enters the classifier (N, H), without dropout."""
    ids, _ = rows
    features = []
    hook = model.classifier.register_forward_pre_hook(
        lambda module, inputs: features.append(inputs[0])
    )
    model.eval()
    logits = torch.cat([model(batch).logits for batch in ids.split(256)])
    hook.remove()
    return logits, torch.cat(features)


def predict(model, rows):
    """Probabilities (N, C), float64."""
    logits, _ = outputs(model, rows)
    return logits.double().softmax(dim=1).numpy()
