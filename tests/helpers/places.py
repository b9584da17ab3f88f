"""Where the repository, its golden numbers and the optional data sets lie."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
SHARED = Path(os.environ.get("HF_CALIB_SHARED", ROOT.parent / "shared"))
