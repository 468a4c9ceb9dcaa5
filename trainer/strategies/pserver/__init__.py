"""strategy=pserver_*: parameter servers, which workers reach over ZeroMQ."""
