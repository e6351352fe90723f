"""`rlflow launch`: a run on a cluster, by Slurm, KubeRay or ssh, sized by its plan."""
