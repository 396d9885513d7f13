"""Preference pairs for TRL's DPOTrainer."""
