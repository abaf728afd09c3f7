"""Tables, curves and verdicts, from run directories alone: nothing here imports torch.

`load(directory)` gives a run as plain data, `figure(runs)` a matplotlib figure of one or several,
`verdict(runs)` whether normalisation helped, in numbers and in a sentence.
"""

from normrnn.report.pictures import figure
from normrnn.report.runs import Run, load
from normrnn.report.verdict import Verdict, verdict

__all__ = ["Run", "Verdict", "figure", "load", "verdict"]
