"""Fine-tune a language model as a judge that answers with one of a few tokens, and save it calibrated.

    python recipes/language_model.py --config recipes/configs/ag_news_qwen3.yaml \
        --config recipes/configs/losses/focal.yaml --output_dir outputs/ag_news_qwen3

On several GPUs, replace `python` by `accelerate launch --config_file
recipes/accelerate/8_gpus.yaml`. For a model that does not fit on one GPU, use
`recipes/accelerate/fsdp.yaml`.
"""

import json
import sys
from dataclasses import dataclass

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorWithPadding,
    set_seed,
)
from transformers.hf_argparser import HfArg

from hf_calib import CalibrationTrainer, CalibrationTrainingArguments
from hf_calib.data import DataArguments, label_maps, load_data, load_ood
from hf_calib.experiments import parse_arguments, print_input_errors, train_and_report
from hf_calib.language_models import PromptTemplate, label_token_classifier


@dataclass
class ModelArguments:
    model: str = HfArg(
        default="Qwen/Qwen3-0.6B", help="A causal language model on the Hub or on disk."
    )
    prompt: str = HfArg(
        default="{text}\nThe subject of this text is",
        help="What stands before the answer.",
    )
    chat: bool = HfArg(
        default=False,
        help="Put the prompt into the tokenizer's chat template, as the user's message.",
    )
    system: str | None = HfArg(default=None, help="The system's message of a chat.")
    ends_with: str = HfArg(
        default="", help="What stands after the chat template: 'Answer:'."
    )
    answers: str | None = HfArg(
        default=None,
        help=(
            'One token for each class, as JSON: \'{"World": " World", "Sci/Tech": " Technology"}\'; '
            "by default a space and the class's name."
        ),
    )
    max_length: int = HfArg(
        default=512, help="Tokens of a prompt; longer texts are cut."
    )
    lora_rank: int = HfArg(
        default=0,
        help="Rank of LoRA adapters on all linear layers; 0 trains the whole model.",
    )
    lora_alpha: int = HfArg(default=32, help="Scale of the adapters, times the rank.")
    resume: bool = HfArg(
        default=False, help="Resume from the last checkpoint in output_dir."
    )

    def __post_init__(self):
        if self.max_length < 1:
            raise SystemExit(
                f"expected max_length to be at least 1, got {self.max_length}"
            )


# Errors in the input are one line each, without a traceback.
sys.excepthook = print_input_errors
model_args, data_args, training_args = parse_arguments(
    (ModelArguments, DataArguments, CalibrationTrainingArguments)
)
set_seed(training_args.seed)

# Data: train, calibration (gammas, temperature, choice of the checkpoint) and test (reported,
# nothing else).
with training_args.main_process_first():
    dataset = load_data(data_args)
    elsewhere = load_ood(data_args)
labels = label_maps(dataset)["label2id"]
answers = (
    {name: f" {name}" for name in labels}
    if model_args.answers is None
    else json.loads(model_args.answers)
)
if answers.keys() != labels.keys():
    raise SystemExit(
        f"expected answers to name the classes {list(labels)}, got {list(answers)}; give each its token"
    )

# Model: the rows of its head that are the answers' tokens are the classifier's head.
tokenizer = AutoTokenizer.from_pretrained(model_args.model)
if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token
prompt = PromptTemplate(
    model_args.prompt, model_args.chat, model_args.system, model_args.ends_with
)
model = label_token_classifier(
    AutoModelForCausalLM.from_pretrained(model_args.model, dtype="float32"),
    tokenizer,
    {name: answers[name] for name in labels},
    prompt=prompt,
)
if model_args.lora_rank:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        task_type="SEQ_CLS",
        r=model_args.lora_rank,
        lora_alpha=model_args.lora_alpha,
        target_modules="all-linear",
        modules_to_save=["score"],
    )
    model = get_peft_model(model, lora)


def tokenize(rows):
    def ids(row):
        _, found = prompt.fitting(
            row["text"], tokenizer=tokenizer, max_length=model_args.max_length
        )
        return {"input_ids": found}

    return rows.map(ids, remove_columns="text")


with training_args.main_process_first():
    splits = {name: tokenize(rows) for name, rows in dataset.items()}
    elsewhere = {name: tokenize(rows) for name, rows in elsewhere.items()}

# Train, report, save.
trainer = CalibrationTrainer(
    model,
    training_args,
    train_dataset=splits["train"],
    eval_dataset=splits["calibration"],
    calibration_dataset=splits["calibration"],
    processing_class=tokenizer,
    data_collator=DataCollatorWithPadding(tokenizer),
)
train_and_report(trainer, splits["test"], elsewhere=elsewhere, resume=model_args.resume)
trainer.accelerator.end_training()
