"""Fine-tune an image classifier with a calibration loss, and save it calibrated.

    python recipes/image_classification.py --config recipes/configs/cifar10_vit.yaml --output_dir outputs/cifar10

On several GPUs, replace `python` by `accelerate launch --config_file
recipes/accelerate/8_gpus.yaml` or by `torchrun --nproc_per_node 8`. torchvision is not needed.

The networks of the papers, trained from scratch:

    python recipes/image_classification.py --config recipes/configs/cifar10_papers.yaml \
        --config recipes/configs/networks/resnet50.yaml --config recipes/configs/losses/adafocal.yaml
"""

import json
import sys
from dataclasses import dataclass

from papers.dynamics import TrainingTrace
from papers.images import gaussian_noise, ten_crops, write_ten_crop_report
from papers.networks import IMAGE_NETWORKS, network_config
from papers.pixels import PixelTransform, decode_images
from torch.optim.lr_scheduler import MultiStepLR
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    ViTImageProcessorPil,
    set_seed,
)
from transformers.hf_argparser import HfArg

from hf_calib import CalibrationTrainer, CalibrationTrainingArguments
from hf_calib.data import (
    DataArguments,
    ImageTransform,
    check_reads_rgb,
    collate_images,
    label_maps,
    load_data,
    load_image_processor,
    load_ood,
    multi_hot,
)
from hf_calib.experiments import parse_arguments, print_input_errors, train_and_report


@dataclass
class ModelArguments:
    model: str = HfArg(
        default="google/vit-base-patch16-224-in21k",
        help=f"A model on the Hub or on disk, or a network from scratch: {', '.join(IMAGE_NETWORKS)}.",
    )
    from_scratch: bool = HfArg(
        default=False,
        help="Take the network and the processor of the model, with new weights.",
    )
    model_kwargs: str = HfArg(
        default="{}", help="Of a network from scratch, as JSON: '{\"depth\": 110}'."
    )
    decay_all: bool = HfArg(
        default=False,
        help="Decay biases and norms as well, as SGD does in the papers' code; the Trainer does not.",
    )
    weights: str | None = HfArg(
        default=None,
        help="For a network from scratch: weights of the same names to start from, its head left out.",
    )
    image_size: int = HfArg(
        default=32, help="Height and width, for a network from scratch."
    )
    image_mean: list[float] = HfArg(
        default_factory=lambda: [0.5, 0.5, 0.5],
        help="Of the channels, for a network from scratch.",
    )
    image_std: list[float] = HfArg(
        default_factory=lambda: [0.5, 0.5, 0.5],
        help="Of the channels, for a network from scratch.",
    )
    crop: str = HfArg(
        default="resized",
        help="In training: resized (photographs), pad (small images) or none.",
    )
    padding: int | None = HfArg(
        default=None,
        help="Of the crop pad, in pixels; by default an eighth of the side.",
    )
    flip: bool = HfArg(
        default=True, help="In training: flip half of the images horizontally."
    )
    decode_once: bool = HfArg(
        default=False,
        help="Keep the pixels of all images on disk; for small images, which train faster.",
    )
    ten_crop: int | None = HfArg(
        default=None,
        help=(
            "Also report the mean over ten crops per image, resized to this height and width before: 256 for "
            "crops of 224. The saved model sees one image."
        ),
    )
    ood_noise: bool = HfArg(
        default=False,
        help="OOD detection of the test images under the noise of CIFAR-10-C, as --ood_data does for others.",
    )
    lr_milestones: list[float] = HfArg(
        default_factory=list,
        help="Epochs from which on the learning rate is multiplied by lr_decay, such as 150 250.",
    )
    lr_decay: float = HfArg(default=0.1, help="With lr_milestones.")
    training_trace: bool = HfArg(
        default=False,
        help="Record at each evaluation what the papers' figures need, in training_trace.json.",
    )
    resume: bool = HfArg(
        default=False, help="Resume from the last checkpoint in output_dir."
    )


# Errors in the input are one line each, without a traceback.
sys.excepthook = print_input_errors
model_args, data_args, training_args = parse_arguments(
    (ModelArguments, DataArguments, CalibrationTrainingArguments)
)
# The images would be dropped before they are transformed.
training_args.remove_unused_columns = False
set_seed(training_args.seed)

# Data: train, calibration (gammas, temperature, choice of the checkpoint) and test (reported,
# nothing else).
with training_args.main_process_first():
    dataset = load_data(data_args, images=True)
    elsewhere = load_ood(data_args, images=True)
    if model_args.ood_noise:
        unlabelled = dataset["test"].remove_columns("label")
        noisy = gaussian_noise(unlabelled, seed=data_args.split_seed)
        elsewhere["gaussian noise"] = noisy
labels = label_maps(dataset)
# Several labels per row become floats.
dataset = multi_hot(dataset)

# Model and image processor.
if model_args.model in IMAGE_NETWORKS:
    size = {"height": model_args.image_size, "width": model_args.image_size}
    processor = ViTImageProcessorPil(
        size=size, image_mean=model_args.image_mean, image_std=model_args.image_std
    )
    config_class = IMAGE_NETWORKS[model_args.model].config_class
    config = network_config(config_class, model_args.model_kwargs, **labels)
    model = AutoModelForImageClassification.from_config(config)
    if model_args.weights is not None:
        model = type(model).from_pretrained(
            model_args.weights, config=config, ignore_mismatched_sizes=True
        )
else:
    processor = load_image_processor(model_args.model)
    if model_args.from_scratch:
        settings = json.loads(model_args.model_kwargs)
        config = AutoConfig.from_pretrained(model_args.model, **settings, **labels)
        model = AutoModelForImageClassification.from_config(config)
    else:
        # A head for other classes is replaced.
        model = AutoModelForImageClassification.from_pretrained(
            model_args.model, ignore_mismatched_sizes=True, **labels
        )
check_reads_rgb(model.config)

# For the test alone: ten views of each image. The calibration rows' are for a temperature of the
# mean.
crops = {}
if model_args.ten_crop is not None:
    with training_args.main_process_first():
        for name in ("calibration", "test"):
            crops[name] = ten_crops(dataset[name], processor, model_args.ten_crop)

# Augmentation, in training only.
transform = ImageTransform
if model_args.decode_once:
    transform = PixelTransform
    with training_args.main_process_first():
        for splits in (dataset, elsewhere):
            for name, rows in splits.items():
                splits[name] = decode_images(rows, processor)
augmented = transform(
    processor, crop=model_args.crop, flip=model_args.flip, padding=model_args.padding
)
plain = transform(processor)
train = dataset["train"].with_transform(augmented)
calibration = dataset["calibration"].with_transform(plain)
test = dataset["test"].with_transform(plain)
elsewhere = {name: rows.with_transform(plain) for name, rows in elsewhere.items()}


# Train, report, save.
class Trainer(CalibrationTrainer):
    def get_decay_parameter_names(self, model):
        if model_args.decay_all:
            return [name for name, _ in model.named_parameters()]
        return super().get_decay_parameter_names(model)

    def create_scheduler(self, num_training_steps, optimizer=None):
        if model_args.lr_milestones:
            per_epoch = num_training_steps / self.args.num_train_epochs
            steps = [round(epoch * per_epoch) for epoch in model_args.lr_milestones]
            own = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = MultiStepLR(own, steps, model_args.lr_decay)
        return super().create_scheduler(num_training_steps, optimizer)


trainer = Trainer(
    model,
    training_args,
    train_dataset=train,
    eval_dataset=calibration,
    calibration_dataset=calibration,
    processing_class=processor,
    data_collator=collate_images,
)
if model_args.training_trace:
    trainer.add_callback(TrainingTrace(trainer, test_dataset=test))
train_and_report(trainer, test, elsewhere=elsewhere, resume=model_args.resume)
if crops:
    write_ten_crop_report(
        trainer, crops, f"{training_args.output_dir}/report_ten_crops"
    )
trainer.accelerator.end_training()
