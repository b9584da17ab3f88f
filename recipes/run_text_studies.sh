#!/usr/bin/env bash
# The papers' text settings at full length: the CNN on 20 Newsgroups and AG News, 50 epochs, and BERT on 20 Newsgroups. A
# training of a CNN takes a CPU core hours. Killed at any time, the same command goes on where it was.
#   bash recipes/run_text_studies.sh OUTPUT DATA BERT [SEEDS ...]
# DATA has 20newsgroups/{train,test}.parquet and ag_news/{train,test}.csv.gz, all 120,000 rows for training; AG_NEWS names
# another file of them, whose study is then of as many rows as that has. BERT is bert-base-uncased, by its name on the Hub
# or its folder, or a smaller encoder. GLOVE is glove.6B.100d.txt, the papers' frozen word vectors; without it the CNN
# learns its own. COMPARE is as in run_studies.sh.
set -euo pipefail
output=$1 data=$2 bert=$3 seeds=${*:4}
here=$(cd "$(dirname "$0")" && pwd)
common=(--disable_tqdm true --report_to none)
newsgroups=(--train_file "$data/20newsgroups/train.parquet" --test_file "$data/20newsgroups/test.parquet")
ag_news=(--train_file "${AG_NEWS:-$data/ag_news/train.csv.gz}" --test_file "$data/ag_news/test.csv.gz")
glove=(${GLOVE:+--glove_file "$GLOVE"})
# The papers' criteria beside the least NLL: the least ECE (dual focal, FCL), the least equal-mass ECE (AdaFocal).
methods=temperature,temperature_ece,temperature_adaptive_ece,auto,ensemble_temperature,spline

study() { # NAME CONFIG LOSSES ARGUMENTS...
  hf-calib compare-losses "$here/text_classification.py" --config "$2" --losses "$3" --seeds "$seed" --methods "$methods" \
    --output "$output/$1" ${COMPARE:---jobs 2} --no-keep-models -- "${@:4}" "${common[@]}"
}

mmce=$here/configs/losses/mmce.yaml # the authors' normalisation, which the weight of the papers is for
# The first five are what a CPU may get through.
cnn_losses=cross_entropy,focal,dual_focal,focal_calibration_20newsgroups,adafocal,brier,$mmce,label_smoothing,flsd,bsce_gra,bsce_gra_authors
ag_losses=${cnn_losses/focal_calibration_20newsgroups/focal_calibration_ag_news}
# The first six are AdaFocal's row of BERT.
bert_losses=cross_entropy,adafocal,flsd,$mmce,brier,label_smoothing,adafocal_every_10_steps,focal,dual_focal,focal_calibration_20newsgroups

for seed in ${seeds:-1 2 3}; do
  study 20newsgroups_cnn_50_epochs 20newsgroups_cnn.yaml "$cnn_losses" "${newsgroups[@]}" "${glove[@]+"${glove[@]}"}"
  study 20newsgroups_bert 20newsgroups_bert.yaml "$bert_losses" --model "$bert" "${newsgroups[@]}"
  study ag_news_cnn_50_epochs ag_news_cnn.yaml "$ag_losses" "${ag_news[@]}" "${glove[@]+"${glove[@]}"}"
done
