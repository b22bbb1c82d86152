"""Rollout engines: the native one, which shares every kernel with training."""
