"""What the present machine is (`detect.detect`) and what it sustains (`calibrate.calibrate`)."""
