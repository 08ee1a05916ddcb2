"""Suites are read strictly, and what decides a number decides the suite's id."""

import pytest

from a3r.bench.suites import find_suites, load_suite, only_tasks
from a3r.strictyaml import FormatError


@pytest.fixture
def suite(project):
    return project.root / "blueprints/suites/light.yaml"


def edited(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return path


def test_a_metric_that_the_blueprint_does_not_write_is_refused(suite):
    edited(suite, "      speed: {direction", "      sped: {direction")
    with pytest.raises(FormatError, match=r"metric 'sped' .*did you mean 'speed'"):
        load_suite(suite)


def test_an_unknown_key_is_refused_with_its_line(suite):
    edited(suite, "modules: [subject]", "module: [subject]")
    with pytest.raises(FormatError, match=r"light.yaml:4: module: unknown key; did you mean 'modules'"):
        load_suite(suite)


def test_a_missing_harness_file_is_refused(suite):
    edited(suite, "modules: [subject]", "harness: [nowhere.py]")
    with pytest.raises(FormatError, match=r"nowhere.py: No such file"):
        load_suite(suite)


def test_a_threshold_does_not_change_the_id_but_a_command_does(suite):
    before = load_suite(suite).id
    assert load_suite(edited(suite, "min_effect: 0.2", "min_effect: 0.3")).id == before
    assert load_suite(edited(suite, "client.py", "other.py")).id != before


def test_an_unknown_suite_or_task_names_the_near_one(project):
    with pytest.raises(FormatError, match="did you mean 'light'"):
        find_suites(["ligth"], project.root)
    with pytest.raises(FormatError, match="did you mean 'drive'"):
        only_tasks(find_suites([], project.root), ["drives"])


def test_the_shipped_suites_load(request):
    loaded = find_suites([], request.config.rootpath)
    assert {s.name for s in loaded} == {"learning", "speed"}
