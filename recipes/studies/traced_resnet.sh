#!/usr/bin/env bash
# Train ResNet-20 on 3,000 images of CIFAR-10 with three losses, record the dynamics, and draw the figures: 7 minutes
# on one core.
#   bash recipes/studies/traced_resnet.sh OUTPUT [ARGUMENTS OF THE RECIPE ...]
# For example: --dataset FOLDER --image_column image. The runs are written to outputs/traced_resnet.
set -euo pipefail
output=${1:?name a folder for the figures} trainings=outputs/traced_resnet
here=$(cd "$(dirname "$0")" && pwd)
configs=$here/../configs
mkdir -p "$output"

for loss in cross_entropy dual_focal adafocal; do
  python "$here/../image_classification.py" --config "$configs/cifar10_short.yaml" \
    --config "$configs/networks/resnet20.yaml" --loss "$loss" --training_trace true --output_dir "$trainings/$loss" \
    --max_train_samples 3000 --calibration_size 1000 --max_test_samples 1000 --num_train_epochs 10 --lr_milestones 5 8 \
    --bf16 false --dataloader_num_workers 0 --disable_tqdm true --save_strategy no --seed 0 "${@:2}"
done
python "$here/traced_trainings.py" "$trainings"/{cross_entropy,dual_focal,adafocal} --output "$output"
