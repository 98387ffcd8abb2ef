"""Packages for pip and uv."""

from tests.ssh.conftest import home, shelf

__all__ = ["home", "shelf"]
