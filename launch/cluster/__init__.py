"""Ray: a cluster's jobs and nodes, room for processes, sessions."""
