"""The commands of `hf-calib`: their options, and what each does with them."""
