"""Which labels look wrong."""

from siammm.audit.suspects import Audit, audit, plant_errors

__all__ = ["Audit", "audit", "plant_errors"]
