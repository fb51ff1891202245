"""A finished run: one door to open it, one way to encode with it, and what it leaves on disk."""
