"""A package, so that what its conftest.py shares ends with its last test."""
