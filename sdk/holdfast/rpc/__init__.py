"""gRPC and REST as Holdfast uses them: one codec, one table of statuses, one kind of channel."""

import os

# Read when gRPC is imported. Else it says at each fork, as of a data loader's worker, that it does
# nothing about it.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
