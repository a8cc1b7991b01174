"""What takes several transactions, or asks the metadata service."""
