"""The version of the package, where every layer may import it; public as ``siammm.__version__``."""

__version__ = "0.1.0.dev0"
