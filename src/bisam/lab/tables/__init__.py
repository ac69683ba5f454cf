"""From records to tables: cells, statistics, the published numbers, sweeps, and what a table costs."""
