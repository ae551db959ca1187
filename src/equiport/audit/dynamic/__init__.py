"""What tests and ports do when they run: checks in fresh, limited processes, never in the audit's own."""
