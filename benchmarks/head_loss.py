"""Memory and time of the chunked head and loss, beside a plain computation with all logits at once.

    python -m benchmarks.head_loss memory     peak memory above the inputs and their gradients
    python -m benchmarks.head_loss speed      time beside the plain computation, by chunk size
    python -m benchmarks.head_loss scaling    time by tokens and by vocabulary, with a plot
    python -m benchmarks.head_loss kernel     on CUDA: time and memory by cut-cross-entropy's kernel, beside the chunks

Every case runs in a fresh process. The plain computation is what one would write without this library: logits,
log-softmax, divergence, `backward()`. Inputs are random; a teacher's logits are float16. On a machine that does other
things too, `--clock cpu` with one thread counts only the time that the case had a core.

Without a mode it is speed: 24 processes of 4 repeats by default, about a quarter of an hour of one core's time.

Legend: N tokens, V vocabulary, D hidden, K top-k.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import MB, PeakMemory, Turns, machine_line, median, print_table, run_case, spread, write_plot

OBJECTIVES = {
    "logits": "reverse KL, teacher's logits given",
    "head": "reverse KL, teacher's hidden states and head",
    "topk": "reverse KL, teacher's top 64 and tail",
    "sampled": "policy gradient, sampled token",
}
TOP_K = 64
KERNEL = -1
"""In the place of a chunk's rows: log p of the sampled tokens by cut-cross-entropy's kernel."""
MODULE = "benchmarks.head_loss"


@dataclass(frozen=True)
class Case:
    objective: str
    tokens: int
    vocab: int
    hidden: int
    chunk: int
    """Rows of a chunk; 0 is the plain computation, `KERNEL` the kernel."""
    repeats: int
    dtype: str
    clock: str
    """wall, or cpu: the time that the process had a core."""
    device: str = "cpu"


def measure(case: Case) -> dict[str, Any]:
    """Seconds of each repeat, and the first one's peak bytes above inputs and gradients. Runs in its own process."""
    step, leaves = prepare(case)
    warm, _ = prepare(replace(case, tokens=2, vocab=max(256, 2 * TOP_K), chunk=min(case.chunk, 2)))
    warm()
    peak = PeakMemory() if case.device == "cpu" else DeviceMemory()
    peak.start()
    seconds = [timed(step, case)]
    bytes_above = peak.stop() - sum(leaf.grad.nbytes for leaf in leaves)
    for _ in range(case.repeats - 1):
        for leaf in leaves:
            leaf.grad = None
        seconds.append(timed(step, case))
    return {"seconds": seconds, "bytes": bytes_above}


class DeviceMemory:
    """`PeakMemory` of what torch allocates on the CUDA device."""

    def start(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def stop(self) -> int:
        import torch

        return torch.cuda.max_memory_allocated() - self._before


def timed(step: Callable[[], None], case: Case) -> float:
    import torch

    now = time.perf_counter if case.clock == "wall" else time.process_time
    began = now()
    step()
    if case.device != "cpu":
        torch.cuda.synchronize()
    return now() - began


def prepare(case: Case) -> tuple[Callable[[], None], list[Any]]:
    """A call that computes loss and gradients, and the leaves that get gradients."""
    import torch

    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    hidden_ND = torch.randn(case.tokens, case.hidden).to(case.device, dtype).requires_grad_()
    weight_VD = (torch.randn(case.vocab, case.hidden) * case.hidden**-0.5).to(case.device, dtype).requires_grad_()
    signal = {name: value.to(case.device) for name, value in teacher_signal(case, dtype).items()}
    step = {0: plain_step, KERNEL: kernel_step}.get(case.chunk, chunked_step)
    return step(case, hidden_ND, weight_VD, signal), [hidden_ND, weight_VD]


def teacher_signal(case: Case, dtype: Any) -> dict[str, Any]:
    """What the teacher gives for the case's objective, made in pieces so that making it leaves no peak behind."""
    import torch

    tokens_N = torch.randint(case.vocab, (case.tokens,))
    signal: dict[str, Any] = {"tokens_N": tokens_N, "teacher_logp_N": torch.full((case.tokens,), -12.0)}
    if case.objective == "logits":
        logits_NV = torch.empty(case.tokens, case.vocab, dtype=torch.float16)
        for rows in logits_NV.split(64):
            rows.copy_(torch.randn(rows.shape))
        signal["logits_NV"] = logits_NV
    elif case.objective == "head":
        signal["hidden_ND"] = torch.randn(case.tokens, case.hidden).to(dtype)
        signal["weight_VD"] = (torch.randn(case.vocab, case.hidden) * case.hidden**-0.5).to(dtype)
    elif case.objective == "topk":
        ids_NK = torch.stack([torch.randperm(case.vocab)[:TOP_K] for _ in range(min(case.tokens, 64))])
        ids_NK = ids_NK.repeat(-(-case.tokens // len(ids_NK)), 1)[: case.tokens]
        logp_NB = torch.randn(case.tokens, TOP_K + 1).log_softmax(-1)
        signal |= {"topk_ids_NK": ids_NK, "topk_logp_NK": logp_NB[:, :TOP_K].contiguous()}
        signal["log_tail_N"] = logp_NB[:, TOP_K].contiguous()
    return signal


def chunked_step(case: Case, hidden_ND: Any, weight_VD: Any, signal: dict[str, Any]) -> Callable[[], None]:
    from distill.objectives.head_loss import head_loss

    objective, part = lesson(case, signal)

    def step() -> None:
        loss, _ = head_loss(
            hidden_ND, weight_VD, None, [part], objective, vocab_size=case.vocab, chunk_tokens=case.chunk
        )
        loss.backward()

    return step


def kernel_step(case: Case, hidden_ND: Any, weight_VD: Any, signal: dict[str, Any]) -> Callable[[], None]:
    from distill.objectives import kernels
    from distill.objectives.head_loss import sampled_loss

    objective, part = lesson(case, signal)

    def step() -> None:
        logp_N = kernels.sampled_logp(hidden_ND, weight_VD, None, signal["tokens_N"], vocab_size=case.vocab)
        sampled_loss(logp_N, [part], objective)[0].backward()

    return step


def lesson(case: Case, signal: dict[str, Any]) -> tuple[Any, Any]:
    """The objective, and what it is given of its teacher."""
    import torch

    from distill.objectives.corrections import NoCorrection
    from distill.objectives.divergence import ReverseKL
    from distill.objectives.head_loss import TeacherHead, TeacherLogits, TeacherPart
    from distill.objectives.policy_gradient import PolicyGradient
    from distill.objectives.rows import TokenRows

    objective: Any = {
        "topk": lambda: ReverseKL(support="teacher_topk", k=TOP_K),
        "sampled": lambda: PolicyGradient(importance=NoCorrection(), advantage_clip=None),
    }.get(case.objective, ReverseKL)()
    full = None
    if case.objective == "logits":
        full = TeacherLogits(signal["logits_NV"])
    elif case.objective == "head":
        full = TeacherHead(signal["hidden_ND"], signal["weight_VD"])
    members = {name: signal[name] for name in ("topk_ids_NK", "topk_logp_NK", "log_tail_N") if name in signal}
    rows = TokenRows(
        student_logits_NV=torch.empty(case.tokens, 0, device=case.device),
        tokens_N=signal["tokens_N"],
        behaviour_logp_N=signal["teacher_logp_N"],
        teacher_logp_N=signal["teacher_logp_N"],
        **members,
    )
    weights_N = torch.full((case.tokens,), 1.0 / case.tokens, device=case.device)
    return objective, TeacherPart("teacher", rows, torch.arange(case.tokens), weights_N, full)


def plain_step(case: Case, hidden_ND: Any, weight_VD: Any, signal: dict[str, Any]) -> Callable[[], None]:
    import torch

    def divergence(logp_NV: Any) -> Any:
        if case.objective == "sampled":
            current_N = logp_NV.gather(-1, signal["tokens_N"][:, None])[:, 0]
            return -(signal["teacher_logp_N"] - current_N.detach()) * current_N
        if case.objective == "topk":
            inside_NK = logp_NV.gather(-1, signal["topk_ids_NK"])
            outside_N = logp_NV.scatter(-1, signal["topk_ids_NK"], -torch.inf).logsumexp(-1)
            log_p = torch.cat([inside_NK, outside_N[:, None]], -1)
            log_q = torch.cat([signal["topk_logp_NK"], signal["log_tail_N"][:, None]], -1)
            return (log_p.exp() * (log_p - log_q)).sum(-1)
        with torch.no_grad():
            if case.objective == "logits":
                teacher_NV = signal["logits_NV"].float()
            else:
                teacher_NV = (signal["hidden_ND"] @ signal["weight_VD"].T).float()
            log_q = teacher_NV.log_softmax(-1)
            del teacher_NV
        return (logp_NV.exp() * (logp_NV - log_q)).sum(-1)

    def step() -> None:
        logp_NV = (hidden_ND @ weight_VD.T).float().log_softmax(-1)
        divergence(logp_NV).mean().backward()

    return step


def run(case: Case, threads: int, turns: Turns) -> dict[str, Any]:
    how = {0: "plain", KERNEL: "kernel"}.get(case.chunk, f"chunks of {case.chunk}")
    turns.start(f"{OBJECTIVES[case.objective]}, {case.tokens} tokens, V {case.vocab}, {how}")
    return run_case(MODULE, asdict(case), threads=threads)


def require_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(
            "error: kernel needs a CUDA GPU, and torch sees none here\n  fix: run it on a machine with one"
        )
    from distill.objectives import kernels

    if why := kernels.why_unusable():
        raise SystemExit(f"error: kernel needs cut-cross-entropy: {why}\n  fix: {kernels.INSTALL}")


def memory(args: argparse.Namespace) -> None:
    rows = []
    turns = Turns(len(args.objectives) * (len(args.chunks) + len(args.plain_tokens)))
    for objective in args.objectives:
        base = Case(objective, args.tokens, args.vocab, args.hidden, 0, 1, args.dtype, args.clock)
        cells = [OBJECTIVES[objective]]
        for case in [
            *(replace(base, chunk=chunk) for chunk in args.chunks),
            *(replace(base, tokens=tokens) for tokens in args.plain_tokens),
        ]:
            found = run(case, args.threads, turns)
            cells.append(f"{found['bytes'] / MB:.0f} MB")
        rows.append(cells)
    print_table(
        f"Peak memory above inputs and gradients; V {args.vocab}, D {args.hidden}, {args.tokens} tokens, {args.dtype}",
        [
            "objective",
            *(f"chunks of {chunk}" for chunk in args.chunks),
            *(f"plain, {tokens} tokens" for tokens in args.plain_tokens),
        ],
        rows,
    )


def speed(args: argparse.Namespace) -> None:
    rows = []
    turns = Turns(len(args.objectives) * args.rounds * (1 + len(args.chunks)))
    for objective in args.objectives:
        base = Case(objective, args.tokens, args.vocab, args.hidden, 0, args.repeats, args.dtype, args.clock)
        plain: list[float] = []
        ours: dict[int, list[float]] = {chunk: [] for chunk in args.chunks}
        for _ in range(args.rounds):  # in turns, so that a change of the machine's load meets all of them
            plain += run(base, args.threads, turns)["seconds"][1:]
            for chunk, seconds in ours.items():
                seconds += run(replace(base, chunk=chunk), args.threads, turns)["seconds"][1:]
        rows.append([OBJECTIVES[objective], "plain", spread(plain), "1"])
        for chunk, seconds in ours.items():
            ratio = median(seconds) / median(plain)
            rows.append([OBJECTIVES[objective], f"chunks of {chunk}", spread(seconds), f"{ratio:.2f}"])
    print_table(
        f"Loss and gradients; V {args.vocab}, D {args.hidden}, {args.tokens} tokens, {args.dtype}; "
        f"{args.clock} time of {args.rounds} processes of {args.repeats - 1} repeats after one to warm up, "
        "median [least, most]",
        ["objective", "how", "time", "time / plain"],
        rows,
    )


def scaling(args: argparse.Namespace) -> None:
    chunk, panels = args.chunks[0], []
    turns = Turns(len(args.objectives) * (len(args.token_steps) + len(args.vocab_steps)))
    for title, label, cases in [
        (f"V {args.vocab}", "tokens", [(n, n, args.vocab) for n in args.token_steps]),
        (f"{args.tokens} tokens", "vocabulary", [(v, args.tokens, v) for v in args.vocab_steps]),
    ]:
        series: dict[str, list[tuple[float, float]]] = {}
        rows = []
        for value, tokens, vocab in cases:
            cells = [str(value)]
            for objective in args.objectives:
                case = Case(objective, tokens, vocab, args.hidden, chunk, args.repeats, args.dtype, args.clock)
                found = run(case, args.threads, turns)
                series.setdefault(OBJECTIVES[objective], []).append((value, median(found["seconds"][1:])))
                cells += [spread(found["seconds"][1:]), f"{found['bytes'] / MB:.0f} MB"]
            rows.append(cells)
        heads = [head for objective in args.objectives for head in (OBJECTIVES[objective], "peak")]
        print_table(
            f"{title}, D {args.hidden}, chunks of {chunk}, {args.dtype}, {args.clock} time", [label, *heads], rows
        )
        panels.append((f"{title}, D {args.hidden}, chunks of {chunk}", label, series))
    if args.plot:
        write_plot(args.plot, panels, y_label="seconds")
        print(f"\nplot: {args.plot}")


def kernel(args: argparse.Namespace) -> None:
    require_cuda()
    rows = []
    turns = Turns(len(args.chunks) + 1)
    base = Case("sampled", args.tokens, args.vocab, args.hidden, 0, args.repeats, "bfloat16", "wall", "cuda")
    for chunk in (*args.chunks, KERNEL):
        found = run(replace(base, chunk=chunk), args.threads, turns)
        how = "cut-cross-entropy" if chunk == KERNEL else f"chunks of {chunk}"
        rows.append([how, spread(found["seconds"][1:]), f"{found['bytes'] / MB:.0f} MB"])
    print_table(
        f"{OBJECTIVES['sampled']}, on CUDA; V {args.vocab}, D {args.hidden}, {args.tokens} tokens, bfloat16",
        ["how", "time", "peak above inputs and gradients"],
        rows,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", nargs="?", choices=("memory", "speed", "scaling", "kernel"), default="speed", help="default: speed"
    )
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument("--tokens", type=int, default=None, help="default: 8192 for memory, 1024 otherwise")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--chunks", type=int, nargs="+", default=[256], help="rows of a chunk; scaling takes the first")
    parser.add_argument("--plain-tokens", type=int, nargs="*", default=[1024], help="memory: sizes of the plain one")
    parser.add_argument("--token-steps", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--vocab-steps", type=int, nargs="+", default=[8192, 32_768, 65_536, 151_936, 262_144])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=4, help="of a process; the first is not counted in times")
    parser.add_argument("--rounds", type=int, default=3, help="speed: processes a case")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--plot", type=Path, default=None, help="scaling: write an SVG here")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.case:
        print(json.dumps(measure(Case(**json.loads(args.case)))))
        return
    if args.repeats < 2:
        parser.error("--repeats must be at least 2: the first is not counted")
    args.tokens = args.tokens or (8192 if args.what == "memory" else 1024)
    print(machine_line(args.threads))
    {"memory": memory, "speed": speed, "scaling": scaling, "kernel": kernel}[args.what](args)


if __name__ == "__main__":
    main()
