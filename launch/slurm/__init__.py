"""Tandem on Slurm: the jobs of one deployment, their scripts, and the commands over them."""
