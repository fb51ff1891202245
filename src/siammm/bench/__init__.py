"""How fast a machine trains and clusters: the measuring behind ``siammm bench`` and the scripts in ``benchmarks/``.

What is timed is the trainer's own step, loader and clustering on random data.
"""
