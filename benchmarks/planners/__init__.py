"""Plans, speed and quality of the partitioners: the figures of the GraphPipe paper, and ours."""
