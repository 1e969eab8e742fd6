"""How the memory was measured: tasks, models, training, records, recipes, benchmarks."""
