"""Plain-torch oracle of every format: numerics.md, step by step, without any compiled code."""
