"""Typed access to the fields of a `config.json`; wrong values are reported together."""

from collections.abc import Mapping
from typing import Any

from launcher.core.errors import RequestError

MOST_LAYERS = 1024
_LARGEST = 1 << 24


class ConfigFields:
    """A `config.json` with its text part; wrong values are collected, not raised one by one."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        parts = (
            part
            for name in ("text_config", "llm_config", "language_config", "thinker_config")
            if isinstance(part := config.get(name), Mapping)
        )
        inner = next(parts, {})
        nested = inner.get("text_config")
        inner = {**inner, **nested} if isinstance(nested, Mapping) else inner
        self.text: Mapping[str, Any] = {**config, **inner}
        self.wrong: dict[str, object] = {}

    def read_count(self, *names: str, maximum: int = _LARGEST) -> int:
        """Return the first of these fields as a number from 0; 0 if none exists."""
        for name in names:
            value = self.text.get(name)
            if isinstance(value, list) and value and len(set(map(str, value))) == 1:
                value = value[0]
            if value is None:
                continue
            if type(value) is int and 0 <= value <= maximum:
                return value
            self.wrong[name] = value
            break
        return 0

    def read_flag(self, name: str, default: bool) -> bool:
        """Return a boolean field."""
        value = self.text.get(name, default)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.wrong[name] = value
        return default

    def read_strings(self, name: str) -> list[str]:
        """Return a list of strings; [] if the field does not exist."""
        value = self.text.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.wrong[name] = value
            return []
        return value

    def raise_if_wrong(self) -> None:
        """Raise RequestError with all wrong values."""
        layers = self.text.get("num_hidden_layers")
        if isinstance(layers, int) and layers > MOST_LAYERS:
            self.wrong["num_hidden_layers"] = layers
        if self.wrong:
            raise RequestError(
                "invalid values in the model's config.json",
                evidence=[f"{name}: {_shorten(value)}" for name, value in self.wrong.items()],
                hint="use the file that is stored with the model's weights",
            )


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."
