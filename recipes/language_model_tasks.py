"""Write the files of the language model study from the datasets: texts for pretraining and next tokens, and four tasks.

    python recipes/language_model_tasks.py DATA OUTPUT

DATA contains the datasets as published by their authors: ag_news/{train_20k,test}.csv.gz,
20newsgroups/{train,test}.parquet, clinc150/{train,test}.csv.gz and goemotions/{train,test}.csv.gz
with their label_names.json, clinc150/domains.json. OUTPUT will contain, as jsonl: pretraining;
next_token (posts of 20 Newsgroups); topics (AG News); intents (the 15 banking intents of CLINC150);
guard (is a request about money? true for half of the rows); sentiment (comments of GoEmotions with
one emotion, positive or negative as grouped by the authors).
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

MONEY = ("banking", "credit_cards")
TOPICS = ("World", "Sports", "Business", "Sci/Tech")
# The sentiment of each emotion as GoEmotions groups them; ambiguous ones and neutral are left out.
POSITIVE = "admiration amusement approval caring desire excitement gratitude joy love optimism pride relief"
NEGATIVE = "anger annoyance disappointment disapproval disgust embarrassment fear grief nervousness remorse sadness"
SPLITS = ("train", "test")

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("data", type=Path)
parser.add_argument("output", type=Path)
args = parser.parse_args()


def read(name: str) -> Any:
    """A JSON file of the data."""
    return json.loads((args.data / name).read_text())


def write(rows: pd.DataFrame, name: str) -> None:
    path = args.output / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows.to_json(path, orient="records", lines=True, force_ascii=False)
    print(f"{path}: {len(rows):,} rows")


def named(labels: pd.Series, names: Sequence[str]) -> pd.Series:
    return labels.map(dict(enumerate(names)))


def ag_news(split: str) -> pd.DataFrame:
    file = {"train": "train_20k.csv.gz", "test": "test.csv.gz"}[split]
    rows = pd.read_csv(args.data / "ag_news" / file)
    return rows.assign(label=named(rows["label"], TOPICS))


def clinc150(split: str) -> pd.DataFrame:
    """Texts with the name of the intent and its domain."""
    domain_of = {}
    for domain, intents in read("clinc150/domains.json").items():
        domain_of |= dict.fromkeys(intents, domain)
    rows = pd.read_csv(args.data / "clinc150" / f"{split}.csv.gz")
    intents = named(rows["label"], read("clinc150/label_names.json"))
    domains = intents.map(domain_of)
    return pd.DataFrame({"text": rows["text"], "label": intents, "domain": domains})


def posts(split: str) -> pd.DataFrame:
    """Posts of 20 Newsgroups without headers, quotes and footers, and without the shortest."""
    rows = pd.read_parquet(args.data / "20newsgroups" / f"{split}.parquet")
    stripped = pd.DataFrame({"text": rows["text_stripped"].str.strip()})
    return stripped[stripped["text"].str.len() > 100]


def banking(intents: pd.DataFrame) -> pd.DataFrame:
    return intents[intents["domain"] == "banking"][["text", "label"]]


def guard(intents: pd.DataFrame) -> pd.DataFrame:
    is_money = intents["domain"].isin(MONEY)
    money = intents[is_money].assign(label="yes")
    others = intents[~is_money].sample(len(money), random_state=0).assign(label="no")
    chosen = pd.concat([money, others])
    return chosen[["text", "label"]].sample(frac=1, random_state=0)


def sentiment(split: str) -> pd.DataFrame:
    rows = pd.read_csv(args.data / "goemotions" / f"{split}.csv.gz", dtype=str)
    rows = rows[~rows["labels"].str.contains(" ")]
    emotion = named(rows["labels"].astype(int), read("goemotions/label_names.json"))
    group_of = dict.fromkeys(POSITIVE.split(), "positive")
    group_of |= dict.fromkeys(NEGATIVE.split(), "negative")
    label = emotion.map(group_of)
    return pd.DataFrame({"text": rows["text"], "label": label}).dropna()


learnt = [ag_news("train"), clinc150("train"), posts("train")]
texts = pd.concat([rows[["text"]] for rows in learnt])
write(texts.sample(frac=1, random_state=0), "pretraining")
# Halves of the test posts, which pretraining has not seen.
unseen = posts("test")
write(unseen.iloc[0::2], "next_token/train")
write(unseen.iloc[1::2], "next_token/test")
for split in SPLITS:
    intents = clinc150(split)
    write(ag_news(split), f"topics/{split}")
    write(banking(intents), f"intents/{split}")
    write(guard(intents), f"guard/{split}")
    write(sentiment(split), f"sentiment/{split}")
