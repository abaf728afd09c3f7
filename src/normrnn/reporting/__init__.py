"""Run directories as plain data, curves and verdicts; nothing here imports torch."""

from normrnn.reporting.pictures import figure
from normrnn.reporting.result import Result
from normrnn.reporting.runs import Run, load

__all__ = ["Result", "Run", "figure", "load"]
