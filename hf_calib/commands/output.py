"""What an output folder holds of earlier commands: no result stays next to those for other
probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hf_calib._errors import check, few
from hf_calib.decisions.saved import CALIBRATION, DECISIONS, rule_files
from hf_calib.predictions.predictions import holds_model

# One of them is written, of arrays or of tables.
PREDICTIONS = ("predictions.npz", "predictions.parquet")


def results(output: Path) -> list[Path]:
    """What `hf-calib calibrate` wrote on predictions, and `hf-calib decide` on these or others."""
    found = rule_files(output)
    if _is_calibrated(output):
        names = (CALIBRATION, *PREDICTIONS)
        found += [output / name for name in names if (output / name).is_file()]
    return found


def on_lost_rule(output: Path, earlier: Sequence[Path]) -> list[str]:
    """A note where a folder had a rule or a report on one, and a command has removed it."""
    lost = [path for path in earlier if not path.exists()]
    if not lost:
        return []
    what = "The report on an earlier rule"
    if output / DECISIONS in lost:
        what = f"The rule of {DECISIONS}"
    return [
        f"{what} in {output} is removed, as it is for other probabilities. "
        "Run hf-calib decide again."
    ]


def _is_calibrated(output: Path) -> bool:
    """Whether a folder has what is always written with calibrated predictions."""
    written = [output / CALIBRATION, output / "report.json"]
    return all(path.is_file() for path in written)


def check_holds_no_others(output: Path) -> None:
    """Raise if calibrated predictions would replace, or stand next to, a file of the user's."""
    names = [name for name in PREDICTIONS if (output / name).exists()]
    # A calibration writes one of them.
    is_own = not names or (_is_calibrated(output) and len(names) == 1)
    requirement = "output to hold no predictions but those of an earlier calibrate"
    way_out = "name another folder"
    check(is_own, requirement, f"{output} with {few(names)}", way_out)


def check_holds_no_results(output: Path | None) -> None:
    """Raise if a report would stand next to a calibrator or a rule for other rows."""
    # The results next to a model are for its weights.
    if output is None or holds_model(str(output)):
        return
    names = [path.relative_to(output).as_posix() for path in results(output)]
    requirement = "output to hold no results of calibrate or decide"
    way_out = "name another folder, so that these stay next to their own report"
    check(not names, requirement, f"{output} with {few(names)}", way_out)
