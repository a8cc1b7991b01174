"""The models of all services."""

from __future__ import annotations

from typing import Any

from holdfast_services.agent.settings import Settings as AgentSettings
from holdfast_services.kit.settings import Setting, settings_of, settings_of_all
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


def all_settings(service: str) -> list[Setting]:
    """Return all settings of a service, those that every service has last."""
    return [*settings_of(MODELS[service]), *settings_of_all()]
