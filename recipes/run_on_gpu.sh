#!/usr/bin/env bash
# All that a lent GPU should answer, the most wanted first: the kernels' tests and times, then the studies. It writes as it
# goes, can be cut at any minute, and goes on where it was by the same command. Data and models are on disk or on the Hub.
#   bash recipes/run_on_gpu.sh OUTPUT DATA [BERT [JUDGE]]
# DATA, GLOVE and AG_NEWS are as in run_text_studies.sh, with cifar10/{train,test}.parquet and what language_model_tasks.py reads; BERT is
# bert-base-uncased unless given, JUDGE Qwen/Qwen3-0.6B ("scratch": a small decoder that is pretrained first).
set -uo pipefail
output=$1 data=$2 bert=${3:-bert-base-uncased} judge=${4:-Qwen/Qwen3-0.6B}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$output"
export COMPARE=${COMPARE:---jobs 4}

step() { # NAME COMMAND...: its output in a file; a step that fails does not keep the others from running
  echo "$(date +%T) $1"
  "${@:2}" > "$output/$1.log" 2>&1 || echo "$(date +%T) $1 failed: see $output/$1.log"
}

images() {
  for seed in 1 42 71; do
    hf-calib compare-losses "$here/image_classification.py" --config cifar10_short.yaml --config networks/resnet50.yaml \
      --losses cross_entropy,focal,dual_focal,focal_calibration_cifar10,bsce_gra,bsce_gra_authors,adafocal --seeds "$seed" \
      --output "$output/cifar10_resnet50" $COMPARE --no-keep-models -- --train_file "$data/cifar10/train.parquet" \
      --test_file "$data/cifar10/test.parquet" --image_column image --report_to none --disable_tqdm true
  done
}

step kernel_tests make --directory "$here/.." test-gpu
step kernel_times python "$here/../benchmarks/losses.py" --device cuda
step language_model_heads python "$here/../benchmarks/language_models.py" --device cuda
step text bash "$here/run_text_studies.sh" "$output/text" "$data" "$bert"
step images images
step language_models bash "$here/run_language_model_study.sh" "$output/language_models" "$data" "$judge"
