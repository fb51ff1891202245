"""What comes in and what goes out: tables of embeddings, and folders of results that appear whole or not at all."""
