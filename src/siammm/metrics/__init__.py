"""How good features and clusters are: arrays in, numbers out."""
