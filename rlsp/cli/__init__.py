"""The console scripts."""
