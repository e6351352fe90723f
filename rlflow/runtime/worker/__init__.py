"""One process of a plan: the models that it holds, the rows that it keeps."""
