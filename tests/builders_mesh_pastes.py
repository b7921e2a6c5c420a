"""Prints random topologies as nvidia-smi does, and does to the text what terminals, logs and people do to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations

from hypothesis import strategies as st

CLASSES = ("PIX", "PXB", "PHB", "NODE", "SYS")
TITLES = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
PREFIXES = ("", "    ", "# ", "> ", "// ", "[1,0]<stdout>:", "node-7: ", "2026-01-01 10:00:00,123 INFO ", "0: ", "| ")
LEGEND = (
    "Legend:",
    "",
    "  X    = Self",
    "  SYS  = Connection traversing PCIe as well as the SMP interconnect",
    "  NV#  = x",
)
PEERS = ("        GPU0    GPU1", " GPU0   X       OK", " GPU1   CNS     X")


@dataclass(frozen=True)
class Printed:
    """A topology and how it is to be printed. `names` are what the reader must call the devices."""

    gpus: int
    names: tuple[str, ...]
    columns: tuple[str, ...]
    links: dict[tuple[str, str], str]
    affinity: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def cell(self, a: str, b: str) -> str:
        return "X" if a == b else self.links.get((a, b)) or self.links[b, a]


@st.composite
def topologies(draw: st.DrawFn) -> Printed:
    gpus = draw(st.integers(1, 11))
    nics = draw(st.integers(0, 12))
    style = draw(st.sampled_from(["legend", "columns", "mlx5"]))
    columns = [f"GPU{i}" for i in range(gpus)] + [f"mlx5_{i}" if style == "mlx5" else f"NIC{i}" for i in range(nics)]
    legend = [f"rocep{i}s0f1" for i in range(nics)] if style == "legend" else columns[gpus:]
    names = (*columns[:gpus], *legend)
    nvlink = st.integers(1, 18).map(lambda count: f"NV{count}")
    links = {
        (a, b): draw(st.sampled_from(CLASSES) | nvlink if b.startswith("GPU") else st.sampled_from(CLASSES))
        for a, b in combinations(names, 2)
    }
    titles = draw(st.integers(0, 3))
    numbers = st.integers(0, 300)
    fields = (
        st.tuples(numbers, numbers).map(lambda ends: f"{ends[0]}-{ends[1]}") | numbers.map(lambda low: f"{low},7-9"),
        numbers.map(str) | st.just("3,5-9") | st.just("N/A"),
        numbers.map(str) | st.just("N/A"),
    )
    affinity = {name: tuple(draw(field) for field in fields[:titles]) for name in names[:gpus]}
    return Printed(gpus, names, tuple(columns), links, affinity)


@st.composite
def pastes(draw: st.DrawFn) -> tuple[Printed, str]:
    """A topology, and a text that shows it."""
    topology = draw(topologies())
    tabs = draw(st.booleans())
    lost = draw(st.sampled_from([0, 0, 0.05, 0.5]))
    narrow = not tabs and draw(st.booleans())

    def joined(words: list[str]) -> str:
        """Separated as the tool does it, but for the blanks that got lost."""
        text = ""
        for word in words:
            gone = lost > 0 and draw(st.floats(0, 1)) < lost
            text += word if gone else f"{word} " if narrow else f" {word}\t".lstrip(" ") if tabs else word.ljust(8)
        return text

    titles = len(next(iter(topology.affinity.values()), ()))
    header = joined(list(topology.columns)) + " " + ("\t" if tabs else "    ").join(TITLES[:titles])
    lines = [("" if narrow else "\t" if tabs else " " * 8) + header]
    for name, column in zip(topology.names, topology.columns, strict=True):
        cells = joined([column, *(topology.cell(name, other) for other in topology.names)])
        tail = topology.affinity.get(name, ())
        lines.append(f"{cells}{'	' if tabs else ' '}{'	'.join(tail) if tabs else '    '.join(tail)}".rstrip())
    if draw(st.booleans()):
        lines[0] = f"\x1b[4m{lines[0]}\x1b[0m"
    legend = [
        f"  {column}: {name}" for column, name in zip(topology.columns, topology.names, strict=True) if column != name
    ]
    if legend:
        legend = ["", "NIC Legend:", "", *legend]
    around = draw(st.sampled_from([[], ["```"], [""]]))
    before = draw(
        st.sampled_from([[], ["$ nvidia-smi topo -m"], ["GPU Topology:"], ["GPU models: Tesla x 8", ""], list(PEERS)])
    )
    after = draw(st.sampled_from([[], list(LEGEND), ["Hypervisor vendor:: KVM"]]))
    later = draw(st.sampled_from([[], ["", *PEERS]]))
    prefix = draw(st.sampled_from(PREFIXES))
    end = draw(st.sampled_from(["\n", "\r\n"]))
    body = [*before, *around, *lines, "", *after, *legend, *later, *around]
    return topology, end.join(prefix + line for line in body) + end
