"""Pictures of calibration.

matplotlib is imported when one is drawn, and pyplot never, so that no global state changes.
"""

from hf_calib.plots._common import save_figure
from hf_calib.plots.binned import reliability_diagram, reliability_grid
from hf_calib.plots.gammas import gamma_dynamics

__all__ = ["gamma_dynamics", "reliability_diagram", "reliability_grid", "save_figure"]
