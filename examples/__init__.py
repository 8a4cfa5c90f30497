"""Runnable examples; `cronlock dev` without an argument serves `inventory`."""
