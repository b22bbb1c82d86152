"""What a run leaves behind: manifest, consistency report, verdict, and their mirror on Weights & Biases."""
