"""Megatron-Core's GPT model with every arithmetic module replaced by one that keeps the numeric contract."""
