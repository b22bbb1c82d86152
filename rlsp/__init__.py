"""Reinforcement-learning post-training of Megatron-Core models whose bits do not depend on the layout."""
