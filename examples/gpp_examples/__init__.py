"""Examples on real data: ordinary Lightning modules and data modules, written without pipelines in mind."""
