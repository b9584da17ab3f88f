"""`python -m hf_calib`: the command line."""

from hf_calib.cli import app

app(prog_name="hf-calib")
