"""Per-sample matrix products: stored, squared, or added up with weights."""
