"""Lean plasticity and freeze controller."""
