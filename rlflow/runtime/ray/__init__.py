"""Ray: the only package that imports it. Clusters, pools, worker processes, their backend."""
