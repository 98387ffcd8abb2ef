"""The excerpt of `make demo` that the README shows."""

from __future__ import annotations

from scripts import recording

LOG = """\
.venv/bin/vlaunch check -i /x/inventory.yaml
== Connect
  PASS  ssh
57 checks: 57 passed
.venv/bin/vlaunch batch --model m \\
\t--output out
0 rows
rm -rf out
not of vlaunch
"""


def test_each_command_has_its_own_output() -> None:
    """Commands over several lines are one; other programs end a command's output."""
    assert list(recording.parse_commands(LOG)) == [
        (
            "vlaunch check -i /x/inventory.yaml",
            "check",
            ["== Connect", "  PASS  ssh", "57 checks: 57 passed"],
        ),
        ("vlaunch batch --model m --output out", "batch", ["0 rows"]),
    ]


def test_the_picture_has_ends_of_outputs_and_loads_nothing() -> None:
    """Lines that are left out are marked."""
    picture = recording.render_svg(LOG)

    assert "passed" in picture
    assert "…" in picture
    assert "Connect" not in picture
    assert "@font-face" not in picture
    assert "url(http" not in picture


def test_the_picture_of_the_readme_is_small() -> None:
    """And of commands that the demo runs."""
    text = recording.PAGE.read_text(encoding="utf-8")

    assert len(text) < 60_000
    assert all(f"vlaunch&#160;{name}" in text for name in recording.LINES)
