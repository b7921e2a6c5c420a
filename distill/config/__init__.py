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

__all__ = [
    "DataConfig",
    "EvaluationConfig",
    "MeshConfig",
    "ObjectiveConfig",
    "ObserveConfig",
    "PrepareConfig",
    "RolloutConfig",
    "RunConfig",
    "RunSection",
    "ServerConfig",
    "StoreConfig",
    "StudentConfig",
    "TeacherConfig",
    "TeacherManagerConfig",
    "TrainerConfig",
]
