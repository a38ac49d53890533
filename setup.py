"""Builds dist_finegrain; pyproject.toml holds the tools' settings."""

from setuptools import find_packages, setup

setup(
    name="dist_finegrain",
    version="0.1.0",
    description="Fine-grained low-precision training for Megatron-style models",
    license="Apache-2.0",
    packages=find_packages(include=["dist_finegrain", "dist_finegrain.*"]),
    python_requires=">=3.11",
    install_requires=["torch>=2.11"],
    extras_require={
        "test": ["numpy", "pytest", "safetensors"],
        "plot": ["matplotlib"],
        "dev": ["clang-format", "codespell", "pre-commit", "ruff"],
    },
)
