"""Trainers and their configs."""
