"""What a run is, as frozen pydantic models. Unknown keys are errors. Checks that span models live in `checks`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
PATTERNS = {
    r"^(auto|cpu|cuda(:\d+)?)$": "auto, cpu, cuda or cuda:N",
    r"^[\w.-]+$": "a name of letters, digits, '_', '.' and '-'",
}
"""What the patterns of texts mean, for people."""
_DEVICE, _NAME = PATTERNS
Device = Annotated[str, Field(pattern=_DEVICE, description="auto takes a GPU where there is one; cpu, cuda, cuda:N")]
Fraction = Annotated[float, Field(gt=0, le=1)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class RunSection(_Section):
    name: str = Field(default="run", pattern=_NAME, description="names the output folder")
    dir: Path | None = Field(default=None, description="output folder; default outputs/<name>/<time>")
    seed: int = Field(default=0, ge=0, le=2**32 - 1)


class PrepareConfig(_Section):
    """A script that makes what the recipe needs, run once: `python script --output DIR`."""

    script: Path = Field(description="relative to the YAML file")
    output: Path = Field(description="folder that it fills; a finished one is reused while the script is unchanged")


class StudentConfig(_Section):
    backend: str = Field(default="hf", description="registry name of the training backend")
    model: Path = Field(description="Hugging Face folder that the student starts from")
    tokenizer: Path | None = Field(default=None, description="default: the model's folder")
    lr: float = Field(default=1e-5, gt=0, description="peak learning rate")
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    lr_final_ratio: float = Field(
        default=0.0, ge=0, le=1, description="learning rate of the last step, as a share of the peak"
    )
    warmup_steps: int = Field(default=10, ge=0)
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = Field(default=0.01, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="of the forward pass; master weights are float32"
    )
    micro_batch_tokens: Positive = Field(
        default=8192, description="prompt and response tokens a forward pass may hold, padding included"
    )
    gradient_checkpointing: bool = False
    device: Device = "auto"
    threads: Positive = Field(default=1, description="CPU threads of the training process")


class TeacherConfig(_Section):
    model: Path = Field(description="Hugging Face folder")
    weight: float = Field(default=1.0, gt=0, description="weight of its divergence where data name it without a weight")
    base: Path | None = Field(default=None, description="the model that a LoRA adapter in `model` belongs to")
    tokenizer: Path | None = Field(default=None, description="default: the model's folder")


class DataConfig(_Section):
    path: Path = Field(description="JSONL or Parquet file")
    domain: str | None = Field(default=None, description="domain of every row; default: the row's `domain` column")
    teachers: list[str] | dict[str, float] | None = Field(
        default=None,
        description="teachers of every row, with weights if a mapping; default: the row's `teacher` column, else the "
        "teacher named like the domain",
    )
    prompt_field: str = Field(
        default="prompt", description="column with a text, or with chat messages for the model's chat template"
    )
    answer_field: str = "answer"


class RolloutConfig(_Section):
    servers: Positive = Field(default=1, description="rollout servers")
    samples_per_prompt: Positive = 1
    epochs: Positive | None = Field(
        default=None, description="times through the data; default: as often as the steps need"
    )
    max_new_tokens: Positive = 256
    temperature: float = Field(default=1.0, gt=0)
    top_p: Fraction = 1.0
    top_k: int = Field(default=-1, ge=-1)
    requests_per_call: Positive = Field(default=1, description="samples an HTTP request carries; they return together")
    timeout_s: float = Field(default=600.0, gt=0, description="longest wait for one call")
    max_tries: Positive = Field(default=5, description="times a sample is sent again when its server fails")


class TeacherManagerConfig(_Section):
    slots: Positive = Field(default=1, description="model servers that the teachers share")
    slot_gb: float | None = Field(
        default=None, gt=0, description="weight bytes a slot holds, GB = 1e9; default: the largest teacher"
    )
    scheduler: str = "announced"
    max_visit_tokens: Positive = Field(
        default=65536, description="tokens a teacher scores before another gets its turn"
    )
    call_tokens: Positive = Field(default=16384, description="tokens one scoring request carries")
    hold_s: float = Field(
        default=0.05, ge=0, description="how long a visit waits for announced samples of a resident teacher"
    )
    canary_atol: float = Field(default=1e-4, gt=0, description="largest change of the canary's log-probabilities")
    timeout_s: float = Field(default=600.0, gt=0)
    max_tries: Positive = 5


class ServerConfig(_Section):
    program: str = Field(default="embedded", description="embedded | sglang | attach")
    device: Device = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    host: str = Field(default="127.0.0.1", description="address that servers listen on")
    port: int = Field(default=0, ge=0, le=65535, description="first port; 0 takes free ones")
    context_length: Positive | None = Field(default=None, description="default: the model's own")
    max_batch_size: Positive = Field(default=256, description="requests decoded together")
    threads: Positive = Field(default=1, description="CPU threads of each server")
    args: list[str] = Field(default_factory=list, description="passed to the program as they are")
    python: Path | None = Field(default=None, description="interpreter of another environment that has the program")
    rollout_urls: list[str] = Field(default_factory=list, description="attach: rollout servers")
    teacher_urls: list[str] = Field(default_factory=list, description="attach: teacher servers")
    start_timeout_s: float = Field(default=300.0, gt=0)
    max_restarts: int = Field(default=5, ge=0, description="restarts of one server in a run")


class MeshConfig(_Section):
    transport: Literal["auto", "shm", "tcp"] = Field(
        default="auto", description="auto: shared memory on the same host, TCP otherwise"
    )
    bucket_mb: float = Field(default=64.0, gt=0)
    timeout_s: float = Field(default=120.0, gt=0, description="longest silence of a receiver before it is fenced")
    host: str = "127.0.0.1"


class StoreConfig(_Section):
    name: str = "memory"
    capacity: Positive | None = Field(default=None, description="samples held; default: (max_staleness + 2) batches")


class ObjectiveConfig(BaseModel):
    """`name` and the fields of that objective's class; the class checks them."""

    model_config = ConfigDict(frozen=True, extra="allow")
    name: str = "reverse_kl"

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class TrainerConfig(_Section):
    steps: Positive = 100
    batch_size: Positive = Field(default=64, description="samples an optimiser step learns from")
    max_staleness: int = Field(
        default=1, ge=0, description="weight versions a sample may lag behind; 0 is synchronous and reproducible"
    )
    checkpoint_every: Positive | None = Field(default=None, description="steps; default: at the end and on a stop only")
    keep_checkpoints: Positive = 2


class EvaluationConfig(_Section):
    every: Positive | None = Field(
        default=None, description="steps between evaluations; default: at the start and the end only"
    )
    data: list[DataConfig] = Field(
        default_factory=list[DataConfig], description="held-out prompts, with answers for accuracy"
    )
    grader: str = "exact_match"
    limit: Positive | None = Field(default=None, description="prompts a domain at most")
    teachers: bool = Field(default=True, description="also evaluate every teacher")
    kl: bool = Field(
        default=False, description="also measure KL(student || teacher) on fixed answers that the teachers write"
    )
    max_new_tokens: Positive | None = Field(default=None, description="default: as in rollout")


class ObserveConfig(_Section):
    sinks: list[str] = Field(default_factory=lambda: ["jsonl", "tensorboard"])
    progress: Literal["auto", "live", "plain", "none"] = "auto"
    wandb_project: str | None = None


class RunConfig(_Section):
    """A whole run: teachers.yaml after composition."""

    run: RunSection = RunSection()
    prepare: PrepareConfig | None = None
    student: StudentConfig
    teachers: dict[str, TeacherConfig] = Field(min_length=1)
    data: list[DataConfig] = Field(min_length=1)
    objective: ObjectiveConfig = ObjectiveConfig()
    rollout: RolloutConfig = RolloutConfig()
    teacher_manager: TeacherManagerConfig = TeacherManagerConfig()
    server: ServerConfig = ServerConfig()
    mesh: MeshConfig = MeshConfig()
    store: StoreConfig = StoreConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    observe: ObserveConfig = ObserveConfig()
    ray_address: str | None = Field(
        default=None, description="null starts Ray on this machine; auto or an address joins a cluster"
    )
    resume: str | None = Field(
        default=None, description="auto: go on with the newest unfinished run of this name; or a run's folder"
    )
