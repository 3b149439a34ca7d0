"""Examples on real data: ordinary Lightning modules and data modules that know nothing of pipelines."""
