"""The training engine: one loop for every experiment, alone or on several ranks, and evaluation.

The loop knows nothing about text or speech: a `Task` (task.py) gives it losses and validations.
"""
