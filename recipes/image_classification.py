"""Fine-tune an image classifier with a calibration loss, and save it calibrated.

    python recipes/image_classification.py --config recipes/configs/cifar10_vit.yaml --output_dir outputs/cifar10

On several GPUs put `accelerate launch --config_file recipes/accelerate/8_gpus.yaml` or
`torchrun --nproc_per_node 8` in place of `python`. No torchvision is needed.
"""

from dataclasses import dataclass, field

from transformers import AutoImageProcessor, AutoModelForImageClassification, set_seed

from hf_calib import CalibrationTrainer, CalibrationTrainingArguments
from hf_calib.data import DataArguments, ImageTransform, collate_images, label_maps, load_data
from hf_calib.experiments import parse_arguments, train_and_report


@dataclass
class ModelArguments:
    model: str = field(
        default="google/vit-base-patch16-224-in21k", metadata={"help": "A model on the Hub or on disk."}
    )
    crop: str = field(
        default="resized",
        metadata={"help": "In training: resized (photographs), pad (small images) or none."},
    )
    flip: bool = field(default=True, metadata={"help": "In training: flip half of the images horizontally."})
    resume: bool = field(default=False, metadata={"help": "Resume from the last checkpoint in output_dir."})


model_args, data_args, training_args = parse_arguments(
    (ModelArguments, DataArguments, CalibrationTrainingArguments)
)
training_args.remove_unused_columns = False  # the images would be dropped before they are transformed
set_seed(training_args.seed)

# Data: train, calibration (gammas, temperature, choice of the checkpoint) and test (reported, nothing else).
with training_args.main_process_first():
    dataset = load_data(data_args, images=True)

# Model and image processor; a head for other classes is replaced.
processor = AutoImageProcessor.from_pretrained(model_args.model, backend="pil")
model = AutoModelForImageClassification.from_pretrained(
    model_args.model, ignore_mismatched_sizes=True, **label_maps(dataset)
)
augmented = ImageTransform(processor, crop=model_args.crop, flip=model_args.flip)
plain = ImageTransform(processor)
calibration = dataset["calibration"].with_transform(plain)

# Train, report, save.
trainer = CalibrationTrainer(
    model,
    training_args,
    train_dataset=dataset["train"].with_transform(augmented),
    eval_dataset=calibration,
    calibration_dataset=calibration,
    processing_class=processor,
    data_collator=collate_images,
)
train_and_report(trainer, dataset["test"].with_transform(plain), resume=model_args.resume)
trainer.accelerator.end_training()
