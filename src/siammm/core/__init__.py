"""What every layer stands on: errors, devices and ranks, checks, files that appear whole, text for people."""
