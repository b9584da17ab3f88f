"""Our metrics as modules of the `evaluate` library, for code that already works with it.

    import evaluate
    from hf_calib.evaluate_modules import module_path

    metric = evaluate.load(module_path("ece"))
    metric.compute(predictions=probs, references=labels)  # {"ece": 0.04}

    several = evaluate.combine([evaluate.load(module_path(name)) for name in ("ece", "brier")])

Predictions are probabilities (N, C), references class indices (N,). Needs `pip install hf_calib[evaluate]`.
"""

from __future__ import annotations

from pathlib import Path

from hf_calib.metrics._inputs import check_choice

_HOME = Path(__file__).parent
MODULES = ("adaptive_ece", "brier", "classwise_ece", "ece", "smooth_ece")


def module_path(name: str) -> str:
    """Where a module lies, for `evaluate.load`.

    Args:
        name: "ece", "adaptive_ece", "classwise_ece", "smooth_ece" or "brier", which is also the key of its
            result.

    Raises:
        ValueError: if there is no such module.

    >>> module_path("ece").endswith("ece.py")
    True
    """
    check_choice("name", name, MODULES)
    return str(_HOME / name / f"{name}.py")
