#!/usr/bin/env bash
# The image study of docs/results/cifar10.md: ResNet-20 on 10,000 images of CIFAR-10, 30 epochs. It takes hours on a
# CPU. To resume after an interruption, run the same command again.
#   bash recipes/run_image_study.sh OUTPUT DATA [SEEDS ...]
# DATA contains cifar10/{train,test}.parquet and mnist/test.parquet, with the columns image and label. SEEDS and
# COMPARE are those of run_studies.sh.
set -euo pipefail
output=$1 data=$2 seeds=("${@:3}") asked=()
here=$(cd "$(dirname "$0")" && pwd)
# mmce.yaml has the authors' normalisation, to which the weight of the papers belongs; mmce is the library's default.
losses=(cross_entropy focal flsd dual_focal adafocal bsce_gra bsce_gra_authors focal_calibration_cifar10
  mmce.yaml brier)
[ $# -gt 2 ] || seeds=(1 42) # the papers: 1, 42 and 71

for seed in "${seeds[@]}"; do
  asked+=($seed)
  python "$here/compare_losses.py" "$here/image_classification.py" --config "$here/configs/cifar10_short.yaml" \
    --config "$here/configs/networks/resnet20.yaml" --losses "${losses[@]}" --seeds "${asked[@]}" \
    --output "$output/cifar10_resnet20" ${COMPARE:---jobs 2} --delete_models -- \
    --train_file "$data/cifar10/train.parquet" --test_file "$data/cifar10/test.parquet" --image_column image \
    --ood_data "$data/mnist/test.parquet" --ood_noise --max_train_samples 10000 --calibration_size 2000 \
    --num_train_epochs 30 --lr_milestones 13 21 --bf16 false --dataloader_num_workers 0 --disable_tqdm true
done
