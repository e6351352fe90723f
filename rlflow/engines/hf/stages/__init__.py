"""Pipeline parallelism: a rank's stage of a model, and training through all of them."""
