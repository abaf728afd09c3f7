"""Training and evaluation of any task: `task.py` has the base class that a task derives from."""
