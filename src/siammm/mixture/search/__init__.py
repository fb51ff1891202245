"""Search for the nearest components: one door (``neighbours.py``), and the ways to be fast behind it."""
