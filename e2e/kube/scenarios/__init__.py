"""End-to-end scenarios: Hither installed by its chart, and what its users and their faults do."""
