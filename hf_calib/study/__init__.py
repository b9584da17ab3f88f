"""Studies: several losses trained over seeds on one's own data, and compared with intervals."""

from hf_calib.study.study import compare

__all__ = ["compare"]
