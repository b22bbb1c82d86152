"""The numeric contract: which sums are taken, in which order, by which kernel."""
