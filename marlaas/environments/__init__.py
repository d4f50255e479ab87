"""Environments: reasoning-gym tasks, files of questions, either with tools, and users' classes, behind one protocol.

Importing this package is cheap: what an environment needs is imported when one is opened.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from marlaas.environments.protocol import Environment, Example, Message, Outcome, question_key

if TYPE_CHECKING:
    from marlaas.specs import EnvironmentSpec

__all__ = [
    "Environment",
    "Example",
    "Message",
    "Outcome",
    "check_environment",
    "open_environment",
    "question_key",
]


def open_environment(spec: EnvironmentSpec, folder: Path = Path()) -> Environment:
    """The environment of a checked spec, within its limits. Processes start with the first call that needs them.

    folder: what relative paths of the spec are relative to. Raises EnvironmentFailure.
    """
    from marlaas.environments.limits import Limited

    environment: Environment
    if spec.kind == "reasoning_gym":
        from marlaas.environments.reasoning_gym import GymEnvironment

        environment = GymEnvironment(spec)
    elif spec.kind == "dataset":
        from marlaas.environments.dataset import DatasetEnvironment

        environment = DatasetEnvironment(spec, folder)
    elif spec.kind == "tools":
        from marlaas.environments.tools.environment import ToolsEnvironment

        environment = ToolsEnvironment(spec, open_environment(spec.questions, folder), folder)
    else:
        from marlaas.environments.custom import CustomEnvironment

        environment = CustomEnvironment(spec, folder)
    return Limited(environment, spec)


def check_environment(spec: EnvironmentSpec, folder: Path = Path()) -> str | None:
    """What keeps a spec from being opened, as `field: problem`, or None. Opens nothing that stays open."""
    if spec.kind == "reasoning_gym":
        from marlaas.environments.reasoning_gym import check_gym

        return check_gym(spec)
    if spec.kind == "dataset":
        from marlaas.environments.dataset import check_dataset

        return check_dataset(spec, folder)
    if spec.kind == "tools":
        from marlaas.environments.tools.environment import check_tools

        problem = check_environment(spec.questions, folder)
        return f"questions.{problem}" if problem else check_tools(spec, folder)
    from marlaas.environments.custom import check_custom

    return check_custom(spec, folder)
