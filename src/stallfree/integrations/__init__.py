"""Stallfree in other people's training loops."""
