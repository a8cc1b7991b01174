"""gRPC and REST as Holdfast uses them: one codec, one table of statuses, one kind of channel."""
