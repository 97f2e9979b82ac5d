"""Starting a training in several processes: on this machine by torchrun, on a cluster by Ray."""
