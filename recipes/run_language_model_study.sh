#!/usr/bin/env bash
# The language model study of docs/results/language_models.md: judges that answer with one token (topics, intents, a
# guard, sentiment) and next-token prediction, with seven losses. If interrupted, run the same command again: it
# resumes.
#   bash recipes/run_language_model_study.sh OUTPUT DATA [MODEL [SEEDS ...]]
# DATA is that of language_model_tasks.py. MODEL is on the Hub or on disk; Qwen/Qwen3-0.6B is fine-tuned with adapters
# on a GPU. Without MODEL, or with "scratch", a decoder of 4.5M parameters is first pretrained on local text;
# everything then takes an hour or two on two CPU cores. COMPARE is that of run_studies.sh.
set -euo pipefail
output=$1 data=$2 model=${3:-scratch} seeds=("${@:4}") asked=()
here=$(cd "$(dirname "$0")" && pwd)
common=(--disable_tqdm true --report_to none --save_strategy no --logging_steps 25)
losses=(cross_entropy label_smoothing focal adafocal_every_10_steps focal_calibration bsce_gra dft)

[ -e "$output/tasks/sentiment/test.jsonl" ] || python "$here/language_model_tasks.py" "$data" "$output/tasks"
if [ "$model" = scratch ]; then
  model=$output/pretrained
  if [ ! -e "$model/config.json" ]; then
    python "$here/small_decoder.py" "$output/random" "$output/tasks/pretraining.jsonl" \
      --words World Sports Business Technology yes no positive negative A B C D E F G H I J K L M N O
    python "$here/next_token.py" --model "$output/random" --train_file "$output/tasks/pretraining.jsonl" \
      --max_train_tokens 2200000 --num_train_epochs 1 --per_device_train_batch_size 16 --learning_rate 2e-3 \
      --lr_scheduler_type cosine --warmup_steps 100 --calibration_method none --output_dir "$model" "${common[@]}"
  fi
  own=(--learning_rate 5e-4 --per_device_train_batch_size 16 --bf16 false)
  rows=1500 test_rows=2000 epochs=3 tokens=100000
else
  own=(--learning_rate 2e-4 --per_device_train_batch_size 16 --bf16 true)
  adapters=(--lora_rank 16 --lora_alpha 32)
  rows=6000 test_rows=2000 epochs=3 tokens=2000000
fi

study() { # NAME RECIPE ARGUMENTS...
  python "$here/compare_losses.py" "$here/$2.py" --losses "${losses[@]}" --seeds "${asked[@]}" \
    --output "$output/$1" ${COMPARE:---jobs 2} --delete_models "${options[@]}" -- --model "$model" --num_train_epochs "$epochs" --train_file \
    "$output/tasks/$1/train.jsonl" --test_file "$output/tasks/$1/test.jsonl" "${@:3}" "${own[@]}" "${common[@]}"
}

[ $# -gt 3 ] || seeds=(0 1 2)
for seed in "${seeds[@]}"; do
  asked+=($seed)
  for task in guard sentiment intents topics; do
    options=(--config "$here/configs/judge_$task.yaml")
    study "$task" language_model --max_train_samples "$rows" --max_test_samples "$test_rows" \
      --calibration_size 500 "${adapters[@]+"${adapters[@]}"}"
  done
  options=(--calibrators temperature) # Other calibrators take hours on a vocabulary, and cannot be folded.
  study next_token next_token --max_train_tokens "$tokens" --calibration_method temperature
done
