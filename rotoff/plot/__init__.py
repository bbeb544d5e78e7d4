"""Pictures of plans and of the cost of limits: matplotlib figures, as PNG, SVG or PDF::

    rotoff.plot.save(rotoff.plot.timeline(chain, sequence), "plan.svg")

Needs matplotlib and no torch. Every function returns a ``matplotlib.figure.Figure`` that belongs to no window and no
global state, so it works in notebooks, threads and on machines without a display.
"""

try:
    import matplotlib as _matplotlib  # noqa: F401 - here, so that the error below replaces a longer one
except ModuleNotFoundError as error:
    if error.name != "matplotlib":
        raise
    raise ModuleNotFoundError(
        "rotoff.plot needs matplotlib, which is not installed: pip install matplotlib", name="matplotlib"
    ) from error

from .style import save as save
from .timeline import timeline as timeline
from .tradeoff import tradeoff as tradeoff
