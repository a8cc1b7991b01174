"""What takes more than one transaction, or asks the store or the queue: asynchronous, bounded."""
