"""Measurements on this machine: its devices (`detect`), their speed (`calibrate`), and costs of operators (`costs`)."""
