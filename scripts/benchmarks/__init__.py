"""What exactness costs, measured: `./scripts/bench`."""
