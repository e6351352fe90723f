"""`rlflow check`, `viz` and `plan`: a graph and its plan, looked at before anything runs."""
