"""What runs are measured in: their task says."""

from collections.abc import Sequence

from normrnn.config.measure import Measure
from normrnn.config.registry import config_class
from normrnn.report.runs import Run


def measure(runs: Sequence[Run]) -> Measure:
    """The measure of the task that the runs are of."""
    return config_class(runs[0].config).measure(runs[0].settings)
