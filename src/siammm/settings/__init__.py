"""What can be set: frozen dataclasses whose fields are flags, presets, methods, checks, and how they are stored."""
