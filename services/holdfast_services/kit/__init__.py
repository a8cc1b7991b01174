"""What every service needs and none owns: a gRPC server, a runner, logging, ports."""
