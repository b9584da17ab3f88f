#!/usr/bin/env bash
# The studies of docs/results/training.md with many labels a text and with tokens: an hour or two of a CPU. Killed at any time, the same
# command goes on where it was.
#   bash recipes/run_label_studies.sh OUTPUT MINILM DATA [SEEDS ...]
# DATA has goemotions/{train,dev,test} (csv, .gz: text, and labels such as "4 27") and wnut17/{train,dev,test}.jsonl (tokens,
# and ner_tags as ids). The others are as in run_studies.sh.
set -euo pipefail
output=$1 minilm=$2 data=$3 seeds=${*:4}
here=$(cd "$(dirname "$0")" && pwd)
common=(--model "$minilm" --num_train_epochs 3 --bf16 false --train_sampling_strategy group_by_length --disable_tqdm true)
# Files of ids have no names; these are in the order of WNUT-17's own, as the local copy numbers them.
tags=(O B-corporation B-creative-work B-group B-location B-person B-product
  I-corporation I-creative-work I-group I-location I-person I-product)

study() { # NAME RECIPE CONFIG ARGUMENTS...
  hf-calib compare-losses "$here/$2.py" --config "$3" --losses cross_entropy,focal,focal_calibration,adafocal_every_10_steps \
    --seeds "$seed" --output "$output/$1" ${COMPARE:---jobs 2} --no-keep-models -- "${@:4}" "${common[@]}"
}

for seed in ${seeds:-0 1}; do
  study wnut17 token_classification wnut17_minilm.yaml --train_file "$data/wnut17/train.jsonl" \
    --calibration_file "$data/wnut17/dev.jsonl" --test_file "$data/wnut17/test.jsonl" --class_names "${tags[@]}"
  study go_emotions text_classification go_emotions_minilm.yaml --train_file "$data/goemotions/train.csv.gz" \
    --calibration_file "$data/goemotions/dev.csv.gz" --test_file "$data/goemotions/test.csv.gz" --label_separator " " \
    --max_train_samples 5000 --max_calibration_samples 2000
done
