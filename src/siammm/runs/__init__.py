"""A finished run: one door to open it, ``Run.open`` in ``run.py``, one way to encode with it, and its files on disk."""
