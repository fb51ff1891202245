"""Images and tables in: sources, safe decoding, the two views, loaders."""
