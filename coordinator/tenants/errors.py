"""What can be wrong with the tenants' files.

TenantsError
├── TenantsFileError    a file or database that cannot be used
└── Unknown             a tier, tenant or key that there is not; ``param`` says which of them
"""

from __future__ import annotations


class TenantsError(Exception):
    """The message says what was wrong and what to do."""


class TenantsFileError(TenantsError):
    pass


class Unknown(TenantsError):
    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param
