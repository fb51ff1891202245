"""One clustering of a table of embeddings: the fit, the groups, what is known of each row, and all of it over ranks."""
