"""Solvers: TrainingGraph + budget -> Schedule + Certificate. Framework-free."""
