"""Devices of several processes, which divide their layers."""
