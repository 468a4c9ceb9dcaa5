"""The queue of this machine: runs that wait for slots, and the runner that starts them."""
