"""Config files; they import ml_collections and each other, nothing else."""
