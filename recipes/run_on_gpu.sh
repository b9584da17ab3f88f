#!/usr/bin/env bash
# Everything that needs a GPU, in the order of importance: the tests and the speed of the kernels, then the studies.
# Results are written continuously. To resume after an interruption, run the same command again.
#   bash recipes/run_on_gpu.sh OUTPUT DATA [BERT [JUDGE]]
# DATA, GLOVE and AG_NEWS are those of run_text_studies.sh; DATA also contains cifar10/{train,test}.parquet and the
# files of language_model_tasks.py. BERT is bert-base-uncased by default. JUDGE is Qwen/Qwen3-0.6B by default;
# "scratch" is a small decoder that is pretrained first. Models are on disk or on the Hub.
set -uo pipefail
output=$1 data=$2 bert=${3:-bert-base-uncased} judge=${4:-Qwen/Qwen3-0.6B}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$output"
export COMPARE=${COMPARE:---jobs 4}

step() { # NAME COMMAND...: write the output to a file; if a step fails, the others still run
  echo "$(date +%T) $1"
  "${@:2}" > "$output/$1.log" 2>&1 || echo "$(date +%T) $1 failed: see $output/$1.log"
}

images() {
  asked=()
  for seed in 1 42 71; do
    asked+=($seed)
    python "$here/compare_losses.py" "$here/image_classification.py" --config "$here/configs/cifar10_short.yaml" \
      --config "$here/configs/networks/resnet50.yaml" --losses cross_entropy focal dual_focal focal_calibration_cifar10 \
      bsce_gra bsce_gra_authors adafocal --seeds "${asked[@]}" \
      --output "$output/cifar10_resnet50" $COMPARE --delete_models -- --train_file "$data/cifar10/train.parquet" \
      --test_file "$data/cifar10/test.parquet" --image_column image --report_to none --disable_tqdm true
  done
}

step kernel_tests make --directory "$here/.." test-gpu
step kernel_times python "$here/../benchmarks/losses.py" --device cuda
step language_model_heads python "$here/../benchmarks/language_models.py" --device cuda
step text bash "$here/run_text_studies.sh" "$output/text" "$data" "$bert"
step images images
step language_models bash "$here/run_language_model_study.sh" "$output/language_models" "$data" "$judge"
