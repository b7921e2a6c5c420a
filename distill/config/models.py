"""What a run is, as frozen pydantic models. Unknown keys are errors. Checks that span models live in `checks`.

Types are strict: no text stands for a number, no truth value for 1. A whole number may stand for a number, a text for a
path, a list for a tuple; YAML has no other way to write those. Upper bounds are where something else gives way.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator

from distill.config.fields import (
    INT32,
    NAME_PATTERN,
    VARIABLE,
    Count,
    Device,
    FilePath,
    Fraction,
    Host,
    Positive,
    Processes,
    Seconds,
    Section,
    Steps,
    Text,
)
from distill.config.routing import ContextConfig, RoutingConfig


class RunSection(Section):
    name: str = Field(default="run", pattern=NAME_PATTERN, max_length=100, description="names the output folder")
    dir: FilePath | None = Field(default=None, description="output folder; default outputs/<name>/<time>")
    seed: int = Field(default=0, ge=0, le=2**32 - 1, description="of the order of prompts, of sampling and of dropout")


class PrepareConfig(Section):
    """A script that makes what the recipe needs, run once: `python script --output DIR`."""

    script: FilePath = Field(description="relative to the YAML file")
    output: FilePath = Field(description="folder that it fills; a finished one is reused while the script is unchanged")


class LoraConfig(Section):
    """A student of which only small adapters learn."""

    r: Annotated[int, Field(gt=0, le=4096)] = Field(default=16, description="rank of each adapter")
    alpha: float = Field(default=32.0, gt=0, le=1e6, description="the adapter counts alpha / r times")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="of the adapters' inputs, while training")
    targets: str | list[str] = Field(
        default="all-linear",
        description="ends of the names of the layers that get one, a regular expression, or all-linear (not the head)",
    )
    export: Literal["merged", "adapter"] = Field(
        default="merged",
        description="what the end of a run writes: whole weights, or a peft adapter over student.model",
    )

    @field_validator("targets")
    @classmethod
    def _targets_name_layers(cls, targets: str | list[str]) -> str | list[str]:
        if not targets or not all(targets):
            raise ValueError("names no layer; leave it out for all linear layers but the head")
        if isinstance(targets, str):
            try:
                re.compile(targets)
            except re.error as error:
                raise ValueError(f"is no regular expression: {error}") from error
        return targets


class StudentConfig(Section):
    backend: str = Field(default="hf", description="registry name of the training backend")
    model: FilePath = Field(description="Hugging Face folder that the student starts from")
    tokenizer: FilePath | None = Field(default=None, description="default: the model's folder")
    lr: float = Field(default=1e-5, gt=0, le=1, description="peak learning rate")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        default="linear", description="how the learning rate goes on from its peak until the run ends"
    )
    lr_final_ratio: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of the peak that the learning rate falls to: it gets there behind the last step, so every "
        "step teaches",
    )
    warmup_steps: Count = Field(
        default=10, description="steps in which the learning rate rises evenly; the last of them has the peak"
    )
    betas: Annotated[tuple[float, float], Field(strict=False)] = Field(
        default=(0.9, 0.98), description="AdamW's: decay of the first and of the second moment"
    )
    eps: float = Field(default=1e-8, gt=0, le=1, description="AdamW's: added to the root of the second moment")
    weight_decay: float = Field(
        default=0.01, ge=0, le=100, description="AdamW's, of matrices only; not of the embeddings and the head"
    )
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradients with a larger norm are scaled down to it")
    optimizer: Literal["adamw", "adamw_8bit"] = Field(
        default="adamw", description="adamw_8bit: moments in 8 bits; needs bitsandbytes"
    )
    ema_decay: float | None = Field(
        default=None, gt=0, lt=1, description="export an exponential moving average of the weights; default: none"
    )
    lora: LoraConfig | None = Field(default=None, description="train adapters only; default: all weights")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="of the weights that it computes with and publishes; the optimiser's are float32"
    )
    micro_batch_tokens: Positive = Field(default=8192, description="prompt and response tokens a forward pass may hold")
    packing: bool = Field(
        default=True, description="lay samples end to end, without padding, where the model's attention allows it"
    )
    head_chunk_tokens: Positive = Field(default=256, description="tokens whose logits exist at one time")
    loss_kernel: Literal["auto", "portable", "cut_cross_entropy"] = Field(
        default="auto",
        description="what computes log p of the sampled tokens where the objective needs no more: cut_cross_entropy "
        "(on CUDA, in bfloat16, if it is installed) or portable; auto takes the first where it can be used",
    )
    lean_layers: bool = Field(
        default=True,
        description="backward passes that keep less, for the layers of Llama, Qwen 2 and Qwen 3; same values",
    )
    gradient_checkpointing: bool = Field(
        default=False, description="compute layers again in the backward pass: less memory, more time"
    )
    device: Device = "auto"
    threads: Processes = Field(default=1, description="CPU threads of each training process")
    ranks: Processes = Field(default=1, description="training processes; on GPUs, one for each device that is to train")
    parallel: Literal["fsdp", "ddp"] | None = Field(
        default=None,
        description="with several ranks: fsdp (the default then) spreads weights, gradients and moments over them, ddp "
        "keeps all on each",
    )


class TeacherConfig(Section):
    model: FilePath | None = Field(default=None, description="Hugging Face folder")
    weight: float = Field(
        default=1.0, gt=0, le=1e6, description="weight of its divergence where data name it without a weight"
    )
    base: FilePath | None = Field(default=None, description="the model that a LoRA adapter in `model` belongs to")
    tokenizer: FilePath | None = Field(default=None, description="default: the model's folder")
    alignment: Literal["bytes"] | None = Field(
        default=None,
        description="bytes: its tokenizer is not the student's, and the two are compared on the byte spans that both "
        "spell; needs objective=span_kl",
    )
    url: Text | None = Field(
        default=None,
        description="instead of model: a server elsewhere that serves this teacher, https://host:port; it takes no "
        "slot, and `tokenizer` has to say which folder holds its tokenizer",
    )
    api: Literal["sglang", "openai"] = Field(
        default="sglang",
        description="with url: what the server speaks, SGLang's native API or the OpenAI completions API with "
        "prompt_logprobs, as vLLM has it",
    )
    remote_model: Text | None = Field(
        default=None,
        description="with api=openai: the model's name on the server; default: the only one that it serves",
    )
    api_key_env: str | None = Field(
        default=None,
        pattern=VARIABLE,
        description="with url: the environment variable that holds the server's key; default: none is sent",
    )
    concurrency: Processes = Field(default=8, description="with url: requests under way on the server at one time")
    temperature: float = Field(
        default=1.0,
        ge=0.01,
        le=100,
        description="its logits are divided by it before they are compared; other than 1 needs the embedded server",
    )
    context: ContextConfig | None = Field(
        default=None, description="what it alone reads with each prompt; default: what the student reads"
    )


class DataConfig(Section):
    path: FilePath = Field(description="JSONL or Parquet file")
    domain: str | None = Field(default=None, description="domain of every row; default: the row's `domain` column")
    teachers: list[str] | dict[str, float] | None = Field(
        default=None,
        description="teachers of every row, with weights if a mapping; default: the row's `teacher` or `teachers`, "
        "else the first rule of routing that fits it, else the teacher named like the domain",
    )
    prompt_field: str = Field(
        default="prompt", description="column with a text, or with chat messages for the model's chat template"
    )
    answer_field: str = Field(default="answer", description="column with the answer that graders compare with")


class RolloutConfig(Section):
    servers: Processes = Field(default=1, description="rollout servers")
    samples_per_prompt: Positive = Field(default=1, description="answers that the student writes to each prompt")
    epochs: Positive | None = Field(
        default=None, description="times through the data; default: as often as the steps need"
    )
    max_new_tokens: Positive = Field(default=256, description="most tokens of an answer; it is cut off there")
    temperature: float = Field(default=1.0, gt=0, le=100, description="of sampling; 1 is the student itself")
    top_p: Fraction = Field(
        default=1.0, description="draw from the fewest ids whose probabilities add up to it; 1: all ids"
    )
    top_k: int = Field(default=-1, ge=-1, le=INT32, description="draw from so many most probable ids; -1: all ids")
    requests_per_call: Positive = Field(default=1, description="samples an HTTP request carries; they return together")
    timeout_s: Seconds = Field(default=600.0, description="longest wait for one call")
    max_tries: Positive = Field(default=5, description="times a sample is sent again when its server fails")


class TeacherManagerConfig(Section):
    slots: Processes = Field(default=1, description="model servers that the teachers share")
    slot_gb: float | None = Field(
        default=None, gt=0, le=1e6, description="weight bytes a slot holds, GB = 1e9; default: the largest teacher"
    )
    topk_dtype: Literal["float16", "float32"] = Field(
        default="float16",
        description="of the log-probabilities of top-k rows on their way from the embedded server; the sampled token's "
        "and the tail are float32 always",
    )
    full_rows: Literal["auto", "hidden", "rows"] = Field(
        default="auto",
        description="how whole rows of the vocabulary travel: rows, or hidden states from which the student makes them "
        "with the teacher's head; auto: whichever is fewer bytes, where hidden states can be had",
    )
    host_gb: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="host memory for teachers that wait, of all slots of a machine together, GB = 1e9; 0: none, they "
        "are read from disk, which the page cache may hold",
    )
    host_differences: bool = Field(
        default=False,
        description="keep teachers of one architecture in host memory as differences from the first: less memory, "
        "slower copies",
    )
    cache_mb: float = Field(
        default=256.0,
        ge=0,
        le=1e6,
        description="memory of the controller for scores that may be asked for again, MB = 1e6 bytes; 0: none, as in "
        "every run with max_staleness 0, which is to be the same each time: hits change what is computed together",
    )
    cache_disk_gb: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="disk for scores that memory has no room for, found by the next start too, GB = 1e9; 0: none",
    )
    cache_folder: FilePath | None = Field(
        default=None, description="where those are, of one run at a time; default: scores/ in the run's folder"
    )
    scheduler: str = Field(
        default="index",
        description="what decides on copies, evictions and visits: a registry name, or package.module:callable",
    )
    call_tokens: Positive = Field(
        default=16384, description="tokens one scoring request carries; another teacher gets its turn behind it"
    )
    deadline_s: Seconds = Field(
        default=120.0, description="age at which a sample should have its scores: those in danger of more go first"
    )
    on_teacher_failure: Literal["stop", "drop_teacher", "wait"] = Field(
        default="stop",
        description="when a teacher cannot be served: end the run; train its samples without it, counted; or try again "
        "until it can",
    )
    canary_atol: float = Field(
        default=1e-4, gt=0, le=1e3, description="largest change of the canary's log-probabilities"
    )
    remote_canary_atol: float = Field(
        default=0.05,
        gt=0,
        le=1e3,
        description="largest change, in nats, of the canary of a teacher with a url: the median of its tokens",
    )
    timeout_s: Seconds = Field(default=600.0, description="longest wait for one scoring request")
    max_tries: Positive = Field(default=5, description="times a sample is sent to its teacher before it has failed")


class ServerConfig(Section):
    program: str = Field(
        default="embedded", description="what serves models: embedded, sglang, or attach for servers that already run"
    )
    device: Device = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="of the weights in servers: the student's while it writes, and the teachers'"
    )
    host: Host = Field(default="127.0.0.1", description="address that servers listen on")
    port: int = Field(default=0, ge=0, le=65535, description="first port; 0 takes free ones")
    context_length: Positive | None = Field(default=None, description="default: the model's own")
    max_batch_size: Positive = Field(default=256, description="requests decoded together")
    threads: Processes = Field(default=1, description="CPU threads of each server")
    args: list[str] = Field(default_factory=list, description="passed to the program as they are")
    python: FilePath | None = Field(default=None, description="interpreter of another environment that has the program")
    rollout_urls: list[str] = Field(default_factory=list, description="attach: rollout servers")
    teacher_urls: list[str] = Field(default_factory=list, description="attach: teacher servers")
    start_timeout_s: Seconds = Field(default=300.0, description="longest wait for a server to come up")
    max_restarts: Count = Field(default=5, description="restarts of one server in a run")


class MeshConfig(Section):
    transport: Literal["auto", "shm", "tcp"] = Field(
        default="auto", description="auto: shared memory on the same host, TCP otherwise"
    )
    bucket_mb: float = Field(
        default=64.0, ge=1e-4, le=4294, description="MB = 1e6 bytes that are sent and checked at a time"
    )
    timeout_s: Seconds = Field(default=120.0, description="longest silence of a receiver before it is fenced")
    host: Host = Field(default="127.0.0.1", description="address that rollout servers receive weights on")


class StoreConfig(Section):
    name: str = Field(default="memory", description="registry name of the sample store, or package.module:Class")
    capacity: Positive | None = Field(default=None, description="samples held; default: (max_staleness + 2) batches")


class OutcomeConfig(Section):
    """Rewards for whole answers, mixed into an objective. Groups are the samples of one prompt."""

    grader: str = Field(default="exact_match", description="what gives an answer its reward")
    mix: Literal["advantage", "loss"] = Field(
        default="advantage",
        description="advantage: weight * outcome + teacher_weight * the policy gradient's advantage; "
        "loss: (1 - teacher_share) * the outcome's policy gradient + teacher_share * any objective",
    )
    weight: float = Field(default=1.0, gt=0, le=1e6, description="of the outcome's advantage; with mix=advantage")
    teacher_weight: float = Field(
        default=1.0, ge=0, le=1e6, description="of the teachers' advantage; with mix=advantage"
    )
    teacher_share: float = Field(default=0.5, ge=1e-6, le=1 - 1e-6, description="of the teachers' loss; with mix=loss")
    importance: Literal["icepop", "none", "tis", "clamp"] = Field(
        default="icepop",
        description="correction of the outcome's policy gradient, as in policy_gradient; with mix=loss",
    )
    baseline: Literal["group", "batch", "none"] = Field(
        default="group",
        description="what a reward is compared with: the mean over the samples of its prompt, that over the batch, "
        "or 0: the reward is the advantage",
    )
    use_std: bool = Field(default=True, description="divide by the standard deviation of the group or batch (GRPO)")
    ddof: Literal[0, 1] = Field(default=1, description="1: the sample's standard deviation; 0: the population's")
    eps: float = Field(default=1e-6, gt=0, le=1, description="added to the standard deviation")
    gae_lambda: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="lambda of generalised advantage estimation over the tokens that the student wrote, tools' answers "
        "stepped over: the token k before the trajectory's last one has lambda^k of the advantage",
    )


class ObjectiveConfig(Section):
    """What is the same for every objective, and beside it the fields of the class that `name` means: it checks them."""

    model_config = ConfigDict(extra="allow")
    name: Text = Field(default="reverse_kl", description="registry name of the loss, or package.module:Class")
    reduction: Literal["token_mean", "seq_mean", "domain_balanced", "segment_mean", "segment_token"] = Field(
        default="token_mean", description="what the step's loss is a mean of"
    )
    domain_weights: dict[Text, Annotated[float, Field(ge=0)]] | None = Field(
        default=None, description="domain_balanced: weight of each domain, divided by their sum; default: equal ones"
    )
    mixture: Literal["weighted", "arithmetic", "geometric"] = Field(
        default="weighted",
        description="several teachers of one sample: their weighted losses added up, or one loss against a mixture of "
        "their distributions",
    )
    outcome: OutcomeConfig | None = Field(default=None, description="rewards for whole answers, mixed in")

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class TrainerConfig(Section):
    steps: Steps = Field(default=100, description="optimiser steps of the run")
    batch_size: Positive = Field(default=64, description="samples an optimiser step learns from")
    max_staleness: Count = Field(
        default=1, description="weight versions a sample may lag behind; 0 is synchronous and reproducible"
    )
    checkpoint_every: Steps | None = Field(default=None, description="steps; default: at the end and on a stop only")
    keep_checkpoints: Positive = Field(default=2, description="newest checkpoints that stay on the disk")
    max_quarantined: Count | None = Field(
        default=None,
        description="samples of the run that may be set aside because they cannot be scored or learnt; default: 1 % of "
        "them, at least 8",
    )


class EvaluationConfig(Section):
    every: Steps | None = Field(
        default=None, description="steps between evaluations; default: at the start and the end only"
    )
    data: list[DataConfig] = Field(
        default_factory=list[DataConfig], description="held-out prompts, with answers for accuracy"
    )
    grader: str = Field(
        default="exact_match", description="what calls an answer right: a registry name, or package.module:function"
    )
    limit: Positive | None = Field(default=None, description="prompts a domain at most")
    teachers: bool = Field(default=True, description="also evaluate every teacher")
    kl: bool = Field(
        default=False, description="also measure KL(student || teacher) on fixed answers that the teachers write"
    )
    max_new_tokens: Positive | None = Field(default=None, description="default: as in rollout")


class ObserveConfig(Section):
    sinks: list[str] = Field(
        default_factory=lambda: ["jsonl", "tensorboard"],
        description="where metrics go: jsonl, tensorboard, wandb, or package.module:Class",
    )
    progress: Literal["auto", "live", "plain", "none"] = Field(
        default="auto", description="what the terminal shows; auto: a live panel, or plain lines where there is none"
    )
    wandb_project: Text | None = Field(default=None, description="project in Weights & Biases; needs the sink wandb")


class RunConfig(Section):
    """A whole run: teachers.yaml after composition."""

    run: RunSection = Field(default=RunSection(), description="name, folder and seed")
    prepare: PrepareConfig | None = Field(
        default=None, description="a script that makes models and prompts before the first run; default: none"
    )
    student: StudentConfig = Field(description="the model that learns, and how")
    teachers: dict[str, TeacherConfig] = Field(min_length=1, description="name -> a model to learn from")
    data: list[DataConfig] = Field(min_length=1, description="prompts to train on, and who teaches them")
    routing: RoutingConfig = Field(default=RoutingConfig(), description="which teacher each prompt goes to")
    objective: ObjectiveConfig = Field(default=ObjectiveConfig(), description="what is minimised")
    rollout: RolloutConfig = Field(default=RolloutConfig(), description="how the student writes answers")
    teacher_manager: TeacherManagerConfig = Field(
        default=TeacherManagerConfig(), description="how teachers share model servers and score answers"
    )
    server: ServerConfig = Field(default=ServerConfig(), description="the model servers of student and teachers")
    mesh: MeshConfig = Field(default=MeshConfig(), description="how weights travel to the rollout servers")
    store: StoreConfig = Field(default=StoreConfig(), description="where samples wait to be learnt")
    trainer: TrainerConfig = Field(default=TrainerConfig(), description="steps, batches, checkpoints")
    evaluation: EvaluationConfig = Field(default=EvaluationConfig(), description="held-out prompts and their measures")
    observe: ObserveConfig = Field(default=ObserveConfig(), description="metrics and progress")
    ray_address: Text | None = Field(
        default=None, description="null starts Ray on this machine; auto or an address joins a cluster"
    )
    resume: Text | None = Field(
        default=None,
        description="auto: go on with the newest unfinished run of this name, or begin a new one where there is none; "
        "or a run's folder",
    )
