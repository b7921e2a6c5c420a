"""What a cluster looks like: GPUs, NICs and networks, how near they are to each other, and how fast they may be.

Seen on this machine (`detect`), read from what people paste (`read_paste`), or simulated from a file (`read_cluster`);
`to_problem` makes of it what the planner takes. What could not be seen is in `Topology.notes`, never made up.
"""

from __future__ import annotations

from distill.transfermesh.topology.classes import PRIORS, Prior, Rate, prior
from distill.transfermesh.topology.cluster import Cluster, read_cluster, read_cluster_file
from distill.transfermesh.topology.files import read_topology_files
from distill.transfermesh.topology.live import detect
from distill.transfermesh.topology.model import Gpu, Host, Interface, Network, Nic, Port, Topology, Wire, together
from distill.transfermesh.topology.problem import to_problem
from distill.transfermesh.topology.reading import Paste, read_paste, read_paste_file

__all__ = [
    "PRIORS",
    "Cluster",
    "Gpu",
    "Host",
    "Interface",
    "Network",
    "Nic",
    "Paste",
    "Port",
    "Prior",
    "Rate",
    "Topology",
    "Wire",
    "detect",
    "prior",
    "read_cluster",
    "read_cluster_file",
    "read_paste",
    "read_paste_file",
    "read_topology_files",
    "to_problem",
    "together",
]
