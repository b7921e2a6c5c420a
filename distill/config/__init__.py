"""Configuration: `models` says what a run is, `compose` reads it with Hydra, `checks` holds every cross-field check."""

from distill.config.models import (
    DataConfig,
    EvaluationConfig,
    MeshConfig,
    ObjectiveConfig,
    ObserveConfig,
    PrepareConfig,
    RolloutConfig,
    RunConfig,
    RunSection,
    ServerConfig,
    StoreConfig,
    StudentConfig,
    TeacherConfig,
    TeacherManagerConfig,
    TrainerConfig,
)
from distill.config.routing import ContextConfig, MatchConfig, RoutingConfig, RuleConfig

__all__ = [
    "ContextConfig",
    "DataConfig",
    "EvaluationConfig",
    "MatchConfig",
    "MeshConfig",
    "ObjectiveConfig",
    "ObserveConfig",
    "PrepareConfig",
    "RolloutConfig",
    "RoutingConfig",
    "RuleConfig",
    "RunConfig",
    "RunSection",
    "ServerConfig",
    "StoreConfig",
    "StudentConfig",
    "TeacherConfig",
    "TeacherManagerConfig",
    "TrainerConfig",
]
