"""`stallfree bench step`: the time of a training step against its floor."""
