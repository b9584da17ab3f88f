"""What an output folder holds of earlier commands: no result stays next to those for other
probabilities.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from hf_calib._errors import check, few
from hf_calib._files import REPORT, report_files
from hf_calib.decisions.saved import CALIBRATION, DECISIONS, RULE_REPORT, rule_files
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


def earlier_results(output: Path) -> list[Path]:
    """The rule in a folder, and the reports on it and on a model there."""
    return [*rule_files(output), *report_files(output)]


def on_removed(output: Path, earlier: Sequence[Path]) -> list[str]:
    """A note on results for other probabilities that are there no longer."""
    named = (DECISIONS, f"{RULE_REPORT}/{REPORT}", REPORT)
    lost = {
        path.relative_to(output).as_posix() for path in earlier if not path.exists()
    }
    found = [name for name in named if name in lost]
    if not found:
        return []
    return [
        f"Removed from {output}: {', '.join(found)}, for other probabilities than those of now. "
        "Run hf-calib decide or evaluate again."
    ]


def write_card_anew(folder: Path, **about: str) -> list[str]:
    """Write the card of a model's folder, and return the warnings."""
    from hf_calib.cards import write_card

    with warnings.catch_warnings(record=True) as caught:
        # By default Python shows a warning once per place.
        warnings.simplefilter("always", UserWarning)
        write_card(folder, **about)
    return [str(each.message) for each in caught]


def refresh_card(output: Path) -> list[str]:
    """Write a card anew that has a section on an earlier calibration, and return the warnings."""
    from hf_calib.cards.card import CARD, START

    card = output / CARD
    is_ours = card.is_file() and START in card.read_text("utf-8", errors="replace")
    return write_card_anew(output) if is_ours else []


def _is_calibrated(output: Path) -> bool:
    """Whether a folder has what is always written with calibrated predictions."""
    written = [output / CALIBRATION, output / REPORT]
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
