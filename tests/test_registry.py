"""Names are registered once and looked up with a hint at the nearest one."""

import pytest

from tokenmix.errors import UserError
from tokenmix.lab.registry import TaskEntry
from tokenmix.registry import Registry, load_object


@pytest.fixture
def registry() -> Registry[TaskEntry]:
    made: Registry[TaskEntry] = Registry("task", lambda: None)
    made.register(TaskEntry(name="a-task", about="one", task="json:loads"))
    return made


def test_a_name_is_found_and_a_wrong_one_gets_the_nearest(registry: Registry[TaskEntry]) -> None:
    assert registry["a-task"].about == "one"
    assert "a-task" in registry
    assert "b-task" not in registry
    with pytest.raises(UserError, match=r"unknown task 'atask'; did you mean a-task"):
        registry["atask"]


def test_names_follow_a_glob_in_the_order_of_registration(registry: Registry[TaskEntry]) -> None:
    registry.register(TaskEntry(name="other", about="two", task=int))
    assert registry.names() == ["a-task", "other"]
    assert registry.names("o*") == ["other"]


def test_a_name_stands_once(registry: Registry[TaskEntry]) -> None:
    registry.register(TaskEntry(name="a-task", about="one", task="json:loads"))  # a module that is imported twice
    with pytest.raises(UserError, match="the task 'a-task' is registered already"):
        registry.register(TaskEntry(name="a-task", about="another", task=int))


def test_an_entry_names_or_holds_its_object(registry: Registry[TaskEntry]) -> None:
    assert load_object(registry["a-task"].task)("[1]") == [1]
    assert load_object(int) is int
