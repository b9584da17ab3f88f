#!/usr/bin/env bash
# The studies of docs/results/tokens_and_labels.md: several labels per text, and token classification. They take an
# hour or two on a CPU. To resume after an interruption, run the same command again.
#   bash recipes/run_label_studies.sh OUTPUT MINILM DATA [SEEDS ...]
# DATA contains goemotions/{train,dev,test} (csv, .gz: text, and labels such as "4 27") and
# wnut17/{train,dev,test}.jsonl (tokens, and ner_tags as ids). The other arguments are those of run_studies.sh.
set -euo pipefail
output=$1 minilm=$2 data=$3 seeds=("${@:4}") asked=()
here=$(cd "$(dirname "$0")" && pwd)
common=(--model "$minilm" --num_train_epochs 3 --bf16 false --train_sampling_strategy group_by_length --disable_tqdm true)
# The files contain ids without names. These names are in the order of the ids of WNUT-17.
tags=(O B-corporation B-creative-work B-group B-location B-person B-product
  I-corporation I-creative-work I-group I-location I-person I-product)

study() { # NAME RECIPE CONFIG ARGUMENTS...
  python "$here/compare_losses.py" "$here/$2.py" --config "$here/configs/$3" \
    --losses cross_entropy focal focal_calibration adafocal_every_10_steps --seeds "${asked[@]}" \
    --output "$output/$1" ${COMPARE:---jobs 2} --delete_models -- "${@:4}" "${common[@]}"
}

[ $# -gt 3 ] || seeds=(0 1)
for seed in "${seeds[@]}"; do
  asked+=($seed)
  study wnut17 token_classification wnut17_minilm.yaml --train_file "$data/wnut17/train.jsonl" \
    --calibration_file "$data/wnut17/dev.jsonl" --test_file "$data/wnut17/test.jsonl" --dataset_revision "" \
    --class_names "${tags[@]}"
  study go_emotions text_classification go_emotions_minilm.yaml --train_file "$data/goemotions/train.csv.gz" \
    --calibration_file "$data/goemotions/dev.csv.gz" --test_file "$data/goemotions/test.csv.gz" --label_separator " " \
    --dataset_config "" --max_train_samples 5000 --max_calibration_samples 2000
done
