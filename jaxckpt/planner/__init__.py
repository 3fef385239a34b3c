"""Plans: what each layer keeps so that a step fits a budget of bytes."""
