"""Values of a YAML document, with their lines."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from launcher.core.errors import InventoryError
from launcher.inventory import document
from launcher.inventory.document import MAX_VALUES, Document, WrittenFloat, parse_document
from launcher.inventory.load import load
from tests.inventory.conftest import GOOD, mistake_of


def _parse(text: str) -> Document:
    return parse_document(textwrap.dedent(text).lstrip("\n"))


def _only_mistake(text: str) -> str:
    read = parse_document(text)
    (mistake,) = read.mistakes

    assert read.data is None

    return f"{mistake.line}: {mistake.text}"


def test_values_and_lines_of_keys_and_items() -> None:
    """Lines are those of keys, not of the values below them."""
    document = _parse("""
        a: 1
        b:
          - x
          - c:
              d: text
    """)

    assert document.data == {"a": 1, "b": ["x", {"c": {"d": "text"}}]}
    assert document.line_of(("a",)) == 1
    assert document.line_of(("b",)) == 2
    assert document.line_of(("b", 1, "c")) == 4
    assert document.line_of(("b", 1, "c", "d")) == 5


def test_a_missing_key_has_its_parents_line() -> None:
    """It is reported at the mapping without it."""
    assert _parse("a: 1\nb: {c: 2}\n").line_of(("b", "d", 3)) == 2


@pytest.mark.parametrize(
    "text",
    [
        "yes",
        "no",
        "on",
        "off",
        "y",
        "2026-11-20",
        "22:22",
        "007",
        "0x10",
        "0o7",
        "+5",
        ".inf",
        "1e3",
        "1_000",
    ],
)
def test_scalars_converted_by_yaml_1_1_stay_text(text: str) -> None:
    """`NO` is a country, `007` a padded number and `22:22` two ports."""
    assert {"a": text} == parse_document(f"a: {text}").data


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("False", False), ("null", None), ("~", None), ("", None), ("-5", -5)],
)
def test_plain_scalars_of_yaml_1_2(text: str, value: object) -> None:
    """Core schema scalars, as in editors."""
    assert {"a": value} == parse_document(f"a: {text}").data


def test_decimal_numbers_keep_their_text() -> None:
    """`1.50` must not reach a program as `1.5`."""
    data = parse_document("a: 1.50").data

    assert data is not None
    number = data["a"]
    assert isinstance(number, WrittenFloat)
    assert (number, number.text) == (1.5, "1.50")


def test_very_long_numbers_stay_text() -> None:
    """Below Python's own limit on digits."""
    assert parse_document(f"a: {'9' * 5000}").data == {"a": "9" * 5000}


def test_a_key_written_twice_is_a_mistake_that_names_both_lines() -> None:
    """YAML libraries silently use the last one."""
    document = _parse("""
        a:
          b: 1
          c: 2
          b: 3
    """)

    (mistake,) = document.mistakes
    assert (mistake.line, mistake.yaml_path, mistake.text) == (
        4,
        ("a", "b"),
        "written twice; the first is on line 2",
    )


def test_merge_keys() -> None:
    """A mapping's own keys win, and earlier sources win over later ones."""
    document = _parse("""
        a: &a {x: 1, y: 1}
        b: &b {y: 2, z: 2}
        c: {<<: *a, x: 3}
        d: {<<: [*a, *b], x: 4}
    """)

    assert document.data is not None
    assert (document.data["c"], document.data["d"]) == ({"x": 3, "y": 1}, {"x": 4, "y": 1, "z": 2})
    assert document.mistakes == ()


def test_a_merge_of_another_value_is_a_mistake() -> None:
    """For example `<<: 5`."""
    (mistake,) = parse_document("a: {<<: 5}").mistakes

    assert "alias to a mapping" in mistake.text


@pytest.mark.parametrize(
    "text",
    ["a: !!python/object:os.system {}", "a: !foo x", "a: !!timestamp 2026-01-01", "a: !!int x"],
)
def test_tags_are_mistakes_or_harmless(text: str) -> None:
    """Tags never construct objects."""
    document = parse_document(text)

    assert document.data is not None
    assert not isinstance(document.data["a"], int)


def test_a_key_that_is_a_list_is_a_mistake() -> None:
    """Keys are scalars."""
    (mistake,) = parse_document("? [a, b]\n: 1\n").mistakes

    assert "a key should be one word" in mistake.text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "1: the file is empty"),
        ("# only a comment\n", "1: the file is empty"),
        ("a: 1\nb: [1\n", "3: not valid YAML: expected ',' or ']'"),
        ("a:\n\tb: 1\n", "2: a tab is used for indentation"),
        ("a: 1\n---\nb: 2\n", "2: should be one YAML document"),
        ("a: *nowhere\n", "1: not valid YAML: found undefined alias 'nowhere'"),
        ("a: 1\nb: \x00\n", "2: the character U+0000 is not allowed in YAML"),
        ("a: b: c\n", "1: not valid YAML: mapping values are not allowed here"),
        ('a: "\\q"\n', "1: not valid YAML: found unknown escape character 'q'"),
        ('"\\UFFFFFFFF": 1\n', "1: not valid YAML: OverflowError"),
        ("a: " + "[" * 5000, "1: nested more than 24 levels deep"),
        ("&a [*a]", "1: nested more than 24 levels deep"),
        ("&a {<<: *a}", "1: nested more than 24 levels deep"),
    ],
)
def test_an_unreadable_file_has_a_single_mistake_with_its_line(text: str, expected: str) -> None:
    """Whatever follows could only be noise."""
    assert _only_mistake(text).startswith(expected)


@pytest.mark.parametrize(
    ("text", "kind"), [("- a\n", "a list"), ("word\n", '"word"'), ("5\n", "5")]
)
def test_a_file_without_a_mapping(text: str, kind: str) -> None:
    """The first message about a wrong file."""
    assert _only_mistake(text).endswith(
        f"should be a mapping that starts with `cluster:`, not {kind}"
    )


def test_an_anchor_bomb_is_rejected() -> None:
    """Ten levels of ten aliases would be ten billion values."""
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]

    assert f"more than {MAX_VALUES} values" in _only_mistake("\n".join(levels))


def test_a_bomb_of_merge_keys_is_rejected() -> None:
    """Merging takes as long as copying."""
    levels = ["a0: &a0 {x: 1}"]
    levels += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 10)]

    assert f"more than {MAX_VALUES} values" in _only_mistake("\n".join(levels))


def test_a_long_list_is_rejected_while_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it takes seconds."""
    monkeypatch.setattr(document, "MAX_VALUES", 10)

    assert _only_mistake("a: [" + "x, " * 20 + "]") == "1: more than 10 values"


def test_a_missing_file(tmp_path: Path) -> None:
    """With the system's reason, without a line, and with the command that writes one."""
    path = tmp_path / "no.yaml"
    with pytest.raises(InventoryError) as caught:
        load(path)

    assert caught.value.message == f"`{path}` cannot be used"
    assert caught.value.mistakes == ("no such file or directory",)
    assert caught.value.hint == "write one with `vlaunch init`, or name another with `-i`"


def test_a_directory(tmp_path: Path) -> None:
    """A directory has its own message."""
    assert mistake_of(tmp_path).startswith("it is a directory")


def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    """Opening a pipe without a writer would block forever."""
    os.mkfifo(tmp_path / "pipe")

    assert mistake_of(tmp_path / "pipe").endswith("is not a regular file")


def test_a_file_of_a_megabyte(tmp_path: Path) -> None:
    """It is rejected by size, before parsing."""
    path = tmp_path / "inventory.yaml"
    path.write_text(GOOD + "# padding\n" * 100_000)

    assert mistake_of(path) == "it is larger than 256 KiB, too large for any inventory"


def test_bytes_that_are_not_utf8_are_reported_with_their_line(tmp_path: Path) -> None:
    """An editor with another encoding is a common cause."""
    path = tmp_path / "inventory.yaml"
    path.write_bytes(GOOD.encode() + b"# caf\xe9\n")

    assert f"{path}:5: the byte 0xe9 is not UTF-8; save the file as UTF-8" == mistake_of(path)


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    """Editors on other systems write one."""
    path = tmp_path / "inventory.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())

    assert load(path).cluster == "pair"


def test_a_name_that_cannot_be_a_path() -> None:
    """A NUL in a path is an error like any other."""
    assert "null" in mistake_of(Path("a\x00b"))


def test_a_wrong_indentation_is_named() -> None:
    """The most common mistake, which the parser describes in its own terms."""
    assert _only_mistake(
        """
        cluster: a
        nodes:
          - name: n1
            host: gpu01
           ip: 10.0.0.1
        """
    ) == ("6: not valid YAML: the indentation differs from that of the block that starts on line 4")
