"""What the commands do, one module each; ``siammm.cli`` imports a module when its command runs."""
