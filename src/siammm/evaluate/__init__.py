"""How good what was learned is, against labels that it never saw."""
