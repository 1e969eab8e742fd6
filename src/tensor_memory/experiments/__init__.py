"""Experiments: tasks, models, one training loop, results. The core never imports from here."""
