"""Tables, curves and verdicts, from run directories alone: nothing here imports torch.

>>> from normrnn import report
>>> sorted(name for name in dir(report) if name in report.__all__)
['figure', 'load']

`load(directory)` gives a run as plain data, `figure(runs)` a matplotlib figure of one or several.
"""

from normrnn.report.pictures import figure
from normrnn.report.runs import Run, load

__all__ = ["Run", "figure", "load"]
