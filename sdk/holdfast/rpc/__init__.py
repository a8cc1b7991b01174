"""gRPC as Holdfast uses it: one codec, one table of statuses, one way to make a channel."""
