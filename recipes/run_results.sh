#!/usr/bin/env bash
# The runs of recipes/RESULTS.md, on a CPU, about an hour and a half on 2 cores. What is finished is skipped.
#   bash recipes/run_results.sh OUTPUT_DIR MODEL AG_NEWS_TRAIN AG_NEWS_TEST NEWSGROUPS_TRAIN NEWSGROUPS_TEST
# MODEL is MiniLM's name on the Hub or its folder; the files are csv (.gz) or parquet with text and label.
set -euo pipefail
out=$1 model=$2 ag_train=$3 ag_test=$4 ng_train=$5 ng_test=$6
losses="cross_entropy focal dual_focal adafocal_every_10_steps bsce_gra mmce"
configs=$(dirname "$0")/configs
run() { # NAME ARGUMENTS...
  [ -e "$out/$1/results.json" ] || python "$(dirname "$0")/text_classification.py" --output_dir "$out/$1" "${@:2}"
}
for seed in 0 1 2; do
  for loss in $losses; do
    run "ag_news_minilm/$loss-$seed" --config "$configs/ag_news_minilm.yaml" --config "$configs/losses/$loss.yaml" \
      --train_file "$ag_train" --test_file "$ag_test" --model "$model" --seed $seed --use_cpu true
  done
done
for loss in cross_entropy focal dual_focal adafocal bsce_gra mmce; do
  run "20newsgroups_cnn/$loss-0" --config "$configs/20newsgroups_cnn.yaml" --config "$configs/losses/$loss.yaml" \
    --train_file "$ng_train" --test_file "$ng_test" --max_length 400 \
    --num_train_epochs 10 --seed 0 --use_cpu true
done
