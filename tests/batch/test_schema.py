"""The schema of job files and the driver's dataclasses."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

import pytest

from launcher.batch import schema
from launcher.batch.driver import job as driver
from launcher.inventory.schema import Section


@pytest.mark.parametrize(
    ("section", "shape", "file", "wire"),
    [
        (schema.ReadSection, driver.Read, {"paths"}, {"sources"}),
        (schema.MessageSection, driver.Message, set(), set()),
        (schema.PromptSection, driver.Prompt, set(), set()),
        (schema.EngineSection, driver.Engine, set(), set()),
        (schema.DataParallelSection, driver.DataParallel, set(), {"port", "nodes"}),
        (schema.PredictSection, driver.Predict, {"class_", "files"}, {"target"}),
        (schema.PreprocessSection, driver.Preprocess, {"function", "files"}, {"target"}),
        (schema.WriteSection, driver.Write, {"path"}, set()),
        (schema.LimitsSection, driver.Limits, set(), set()),
    ],
)
def test_the_file_covers_the_drivers_fields(
    section: type[Section], shape: Any, file: set[str], wire: set[str]
) -> None:
    """With the same names and defaults, except for fields of one side."""
    written = section.model_fields
    payload = {attribute.name: attribute for attribute in fields(shape)}
    assert set(written) ^ set(payload) == file | wire
    for name in set(written) & set(payload) - {"format", "chat", "pair", "placement"}:
        assert written[name].is_required() is _required(payload[name])
        if not written[name].is_required():
            assert written[name].get_default(call_default_factory=True) == _default(payload[name])


def test_the_sections_of_a_job_are_those_of_its_file() -> None:
    """Except for those from the cluster or the command line."""
    payload = {attribute.name for attribute in fields(driver.Job)}
    of_cluster = {"name", "cluster", "work", "out", "identity", "digest"}
    assert payload - of_cluster - {"retry_errors", "restart"} == set(
        schema.JobFile.model_fields
    ) - {"job"}


def _required(item: Any) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def _default(item: Any) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()
