"""The status page, one file without dependencies."""
