"""Tables, curves and HTML from run directories; nothing here imports torch.

`load(directory)` reads a run as plain data, `figure(runs)` draws validation against updates.
"""

from normrnn.reporting.pictures import figure
from normrnn.reporting.result import Result
from normrnn.reporting.runs import Run, load

__all__ = ["Result", "Run", "figure", "load"]
