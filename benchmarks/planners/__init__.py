"""What the partitioners find, how fast, and how good: the figures of the GraphPipe paper, and ours."""
