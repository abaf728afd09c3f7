"""The training engine: one loop for every experiment, run directories, evaluation.

The loop knows nothing about text: a `Task` (task.py) gives it losses and validations.
"""
