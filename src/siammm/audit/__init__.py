"""Which labels look wrong."""
