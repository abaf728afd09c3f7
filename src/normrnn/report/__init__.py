"""Tables, curves and verdicts, from run directories alone: nothing here imports torch."""
