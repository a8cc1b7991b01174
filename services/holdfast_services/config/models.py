"""The models of all services."""

from __future__ import annotations

from typing import Any

from holdfast_services.agent.settings import Settings as AgentSettings
from holdfast_services.kit.settings import LogSettings, Setting, settings_of
from holdfast_services.metadata.settings import Settings as MetadataSettings
from holdfast_services.operator.settings import Settings as OperatorSettings
from holdfast_services.persistence.settings import Settings as PersistenceSettings
from holdfast_services.scheduler.settings import Settings as SchedulerSettings

MODELS: dict[str, type[Any]] = {
    "metadata": MetadataSettings,
    "agent": AgentSettings,
    "persistence": PersistenceSettings,
    "scheduler": SchedulerSettings,
    "operator": OperatorSettings,
}


def settings_with_log(service: str) -> list[Setting]:
    """Return all settings of a service, those of its log last."""
    return [*settings_of(MODELS[service]), *settings_of(LogSettings)]
