"""strategy=pserver_*: parameters in server processes, reached over ZeroMQ."""
