"""What the commands do: each has a module of its name, which ``siammm.cli`` imports when the command runs.

The other modules here are parts of commands: ``prepared``, ``resume`` and ``train_messages`` of ``train``;
``cluster_tables`` of ``cluster``, ``demo`` and ``train``.
"""
