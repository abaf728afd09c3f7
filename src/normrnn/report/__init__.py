"""Tables, curves and verdicts, from run directories alone: nothing here imports torch.

`load(directory)` gives a run as plain data, `figure(runs)` a matplotlib figure of one or several.
"""

from normrnn.report.pictures import figure
from normrnn.report.runs import Run, load

__all__ = ["Run", "figure", "load"]
