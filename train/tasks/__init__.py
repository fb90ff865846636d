"""What is learned: how a row becomes a sample, a batch becomes a loss, and outputs become metrics."""
