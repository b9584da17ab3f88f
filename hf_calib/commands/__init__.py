"""The commands of `hf-calib`, each a function that the command line calls."""
