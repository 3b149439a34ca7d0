"""Checkpoints on a disk: ordinary files of Lightning, and folders that all ranks write and read."""
