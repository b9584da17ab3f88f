"""Write the files of the language model study from the datasets: texts for pretraining and next tokens, and four tasks.

    python recipes/language_model_tasks.py DATA OUTPUT

DATA contains the datasets as published by their authors: ag_news/{train_20k,test}.csv.gz,
20newsgroups/{train,test}.parquet, clinc150/{train,test}.csv.gz and goemotions/{train,test}.csv.gz with their
label_names.json, clinc150/domains.json. OUTPUT will contain, as jsonl: pretraining; next_token (posts of 20
Newsgroups); topics (AG News); intents (the 15 banking intents of CLINC150); guard (is a request about money? true for
half of the rows); sentiment (comments of GoEmotions with one emotion, positive or negative as grouped by the
authors).
"""

import argparse
import json
from pathlib import Path

import pandas as pd

MONEY = ("banking", "credit_cards")
# The sentiment of each emotion as GoEmotions groups them; ambiguous ones and neutral are left out.
POSITIVE = "admiration amusement approval caring desire excitement gratitude joy love optimism pride relief"
NEGATIVE = "anger annoyance disappointment disapproval disgust embarrassment fear grief nervousness remorse sadness"
SPLITS = ("train", "test")


def write(rows: pd.DataFrame, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows.to_json(path, orient="records", lines=True, force_ascii=False)
    print(f"{path}: {len(rows):,} rows")


def ag_news(data: Path, split: str) -> pd.DataFrame:
    rows = pd.read_csv(
        data / "ag_news" / {"train": "train_20k.csv.gz", "test": "test.csv.gz"}[split]
    )
    return rows.assign(
        label=rows["label"].map(
            dict(enumerate(("World", "Sports", "Business", "Sci/Tech")))
        )
    )


def clinc150(data: Path, split: str) -> pd.DataFrame:
    """Texts with the name of the intent and its domain."""
    names = json.loads((data / "clinc150" / "label_names.json").read_text())
    domains = json.loads((data / "clinc150" / "domains.json").read_text())
    domain_of = {
        intent: domain for domain, intents in domains.items() for intent in intents
    }
    rows = pd.read_csv(data / "clinc150" / f"{split}.csv.gz")
    intents = rows["label"].map(dict(enumerate(names)))
    return pd.DataFrame(
        {"text": rows["text"], "label": intents, "domain": intents.map(domain_of)}
    )


def guard(rows: pd.DataFrame) -> pd.DataFrame:
    is_money = rows["domain"].isin(MONEY)
    others = rows[~is_money].sample(is_money.sum(), random_state=0)
    chosen = pd.concat([rows[is_money].assign(label="yes"), others.assign(label="no")])
    return chosen[["text", "label"]].sample(frac=1, random_state=0)


def sentiment(data: Path, split: str) -> pd.DataFrame:
    names = json.loads((data / "goemotions" / "label_names.json").read_text())
    rows = pd.read_csv(data / "goemotions" / f"{split}.csv.gz", dtype=str)
    rows = rows[~rows["labels"].str.contains(" ")]
    emotion = rows["labels"].astype(int).map(dict(enumerate(names)))
    label = emotion.map(
        {
            **dict.fromkeys(POSITIVE.split(), "positive"),
            **dict.fromkeys(NEGATIVE.split(), "negative"),
        }
    )
    return pd.DataFrame({"text": rows["text"], "label": label}).dropna()


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("data", type=Path)
parser.add_argument("output", type=Path)
args = parser.parse_args()

posts = {
    split: pd.read_parquet(args.data / "20newsgroups" / f"{split}.parquet")
    for split in SPLITS
}
stripped = {
    split: pd.DataFrame({"text": rows["text_stripped"].str.strip()})
    for split, rows in posts.items()
}
stripped = {
    split: rows[rows["text"].str.len() > 100] for split, rows in stripped.items()
}
learnt = pd.concat(
    [
        ag_news(args.data, "train")[["text"]],
        clinc150(args.data, "train")[["text"]],
        stripped["train"],
    ]
)
write(learnt.sample(frac=1, random_state=0), args.output / "pretraining.jsonl")
for start, split in enumerate(
    SPLITS
):  # halves of the test posts, which pretraining has not seen
    write(
        stripped["test"].iloc[start::2], args.output / "next_token" / f"{split}.jsonl"
    )
for split in SPLITS:
    intents = clinc150(args.data, split)
    write(ag_news(args.data, split), args.output / "topics" / f"{split}.jsonl")
    write(
        intents[intents["domain"] == "banking"][["text", "label"]],
        args.output / "intents" / f"{split}.jsonl",
    )
    write(guard(intents), args.output / "guard" / f"{split}.jsonl")
    write(sentiment(args.data, split), args.output / "sentiment" / f"{split}.jsonl")
