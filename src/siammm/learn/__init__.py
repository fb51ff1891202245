"""Algorithm 1: train an encoder from unlabelled images, with the mixture as the objective.

Start with ``loop.py``: ``Training.run``, and ``Training.update``, which is the gradient step.
"""
