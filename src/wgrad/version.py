"""The version, in one place: pyproject.toml, `wgrad --version` and reports read it here."""

__version__ = "0.1.0"
