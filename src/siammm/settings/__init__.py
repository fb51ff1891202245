"""Settings: frozen dataclasses whose fields are flags, presets, methods, checks, and how a run stores them."""
