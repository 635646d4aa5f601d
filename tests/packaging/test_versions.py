"""The releases that pyproject.toml allows are those that CI tests; nothing newer is refused."""

import tomllib

import yaml
from distributions import ROOT
from packaging.requirements import Requirement
from packaging.version import Version

from tokenmix.environment import TESTED


def required() -> dict[str, Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return {requirement.name: requirement for requirement in map(Requirement, lines)}


def test_newer_releases_may_be_installed() -> None:
    for name, tested in TESTED.items():
        bounds = required()[name].specifier
        assert {bound.operator for bound in bounds} == {">="}, name
        assert bounds.contains(tested), name


def test_ci_tests_the_oldest_torch() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    oldest = next(one for one in jobs["tests"]["strategy"]["matrix"]["include"] if one["torch"] == "oldest")
    for pin in map(Requirement, oldest["packages"].split()):
        (exact,), (bound,) = pin.specifier, required()[pin.name].specifier
        assert Version(exact.version) == Version(bound.version), pin.name
