"""Ray: jobs and nodes of a cluster, placement of processes, sessions."""
