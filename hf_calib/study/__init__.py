"""Studies: several losses trained with several seeds on your data, and compared with intervals."""

from hf_calib.study.study import compare

__all__ = ["compare"]
