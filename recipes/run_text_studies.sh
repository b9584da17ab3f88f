#!/usr/bin/env bash
# The text settings of the papers at full length: the CNN on 20 Newsgroups and AG News, 50 epochs, and BERT on 20
# Newsgroups. One run of the CNN takes hours on a CPU core. To resume after an interruption, run the same command again.
#   bash recipes/run_text_studies.sh OUTPUT DATA BERT [SEEDS ...]
# DATA contains 20newsgroups/{train,test}.parquet and ag_news/{train,test}.csv.gz, with all 120,000 rows for training;
# AG_NEWS names another training file. BERT is bert-base-uncased, by its name on the Hub or its folder, or a smaller
# encoder. GLOVE is glove.6B.100d.txt, the frozen word vectors of the papers; without it the CNN learns its own.
# COMPARE is that of run_studies.sh.
set -euo pipefail
output=$1 data=$2 bert=$3 seeds=("${@:4}") asked=()
here=$(cd "$(dirname "$0")" && pwd)
common=(--disable_tqdm true --report_to none)
newsgroups=(--train_file "$data/20newsgroups/train.parquet" --test_file "$data/20newsgroups/test.parquet")
ag_news=(--train_file "${AG_NEWS:-$data/ag_news/train.csv.gz}" --test_file "$data/ag_news/test.csv.gz")
glove=(${GLOVE:+--glove_file "$GLOVE"})
# Temperatures by the papers' criteria, the lowest ECE and the lowest equal-mass ECE, are fitted to the logits of the runs:
# by saved_runs.py and further_metrics.py.
calibrators=(temperature auto ensemble_temperature spline)

study() { # NAME CONFIG LOSSES ARGUMENTS...
  python "$here/compare_losses.py" "$here/text_classification.py" --config "$here/configs/$2" --losses $3 \
    --seeds "${asked[@]}" --calibrators "${calibrators[@]}" --output "$output/$1" ${COMPARE:---jobs 2} --delete_models -- \
    "${@:4}" "${common[@]}"
}

# mmce.yaml has the authors' normalisation, to which the weight of the papers belongs; mmce is the library's default.
# The first five fit into the time of a CPU.
cnn_losses="cross_entropy focal dual_focal focal_calibration_20newsgroups adafocal brier mmce.yaml label_smoothing flsd bsce_gra"
cnn_losses="$cnn_losses bsce_gra_authors"
ag_losses=${cnn_losses/focal_calibration_20newsgroups/focal_calibration_ag_news}
# The first six are those of the AdaFocal paper for BERT.
bert_losses="cross_entropy adafocal flsd mmce.yaml brier label_smoothing adafocal_every_10_steps focal dual_focal"
bert_losses="$bert_losses focal_calibration_20newsgroups"

[ $# -gt 3 ] || seeds=(1 2 3)
for seed in "${seeds[@]}"; do
  asked+=($seed)
  study 20newsgroups_cnn_50_epochs 20newsgroups_cnn.yaml "$cnn_losses" "${newsgroups[@]}" "${glove[@]+"${glove[@]}"}"
  study 20newsgroups_bert 20newsgroups_bert.yaml "$bert_losses" --model "$bert" "${newsgroups[@]}"
  study ag_news_cnn_50_epochs ag_news_cnn.yaml "$ag_losses" "${ag_news[@]}" "${glove[@]+"${glove[@]}"}"
done
