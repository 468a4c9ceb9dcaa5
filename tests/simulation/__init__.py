"""The parameter server's own classes in a simulated world: one process, virtual time, everything drawn from one
seed."""
