"""Errors of the tenants' files.

TenantsError
├── TenantsFileError    a file or database that cannot be used
└── Unknown             a tier, tenant or key that does not exist; ``param`` names which
"""

from __future__ import annotations


class TenantsError(Exception):
    """The message names the fault and the remedy."""


class TenantsFileError(TenantsError):
    pass


class Unknown(TenantsError):
    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param
