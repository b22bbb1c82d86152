"""The algorithm: tasks, sampling, rollouts, advantages, the loss and the update."""
