"""The node agent: holds segments in memory, serves and fetches them, speaks to metadata."""
