"""Clusters from files, and the planner's problem that comes of a topology."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.errors import ConfigError
from distill.transfermesh.topology import (
    Gpu,
    Host,
    Nic,
    Port,
    Rate,
    Topology,
    read_cluster,
    read_cluster_file,
    to_problem,
)

ROOT = Path(__file__).parents[2]
PLANS = ROOT / "tests/golden/data/mesh/plans"
RECIPES = sorted((ROOT / "recipes/mesh").glob("*.yaml"))


def rails(**changes: Any) -> dict[str, Any]:
    group = {"gpus": 8, "gpu_link": {"class": "NV18", "gbps": 450, "alpha_us": 5}, "nics": 8, "nic_gbit": 400}
    return {
        "payload_gb": 64,
        "hosts": {"train": {"role": "trainer", **group}, "h": {"role": "engine", "count": 4, **group}},
        "networks": {"rdma": {"scope": "rails", "alpha_us": 12}},
    } | changes


def small(**changes: Any) -> dict[str, Any]:
    hosts = {"t": {"role": "trainer", "nics": 1, "nic_gbit": 100}, "e": {"role": "engine", "nics": 1, "nic_gbit": 100}}
    return {"payload_gb": 1, "hosts": hosts} | changes


def pairs(problem: dict[str, Any], kind: str = "") -> dict[tuple[str, str], float]:
    """Every link of a problem, groups written out."""
    links = {(link["src"], link["dst"], link["kind"]): link["gbps"] for link in problem["links"]}
    for group in problem["link_groups"]:
        links |= {(a, b, group["kind"]): group["gbps"] for a in group["among"] for b in group["among"] if a != b}
    return {(a, b): gbps for (a, b, each), gbps in links.items() if kind in ("", each)}


def test_the_rails_of_the_acceptance_data() -> None:
    """The same nodes, links and limits as somebody wrote by hand for the plans' golden case 03."""
    problem = read_cluster(rails()).problem()
    groups = [
        (group["kind"], tuple(group["among"]), group["gbps"], group["alpha_us"]) for group in problem["link_groups"]
    ]
    hosts = ["train", "h1", "h2", "h3", "h4"]
    assert [group for group in groups if group[0] == "nvlink"] == [
        ("nvlink", tuple(f"{host}.g{gpu}" for gpu in range(8)), 450.0, 5.0) for host in hosts
    ]
    assert [group for group in groups if group[0] == "rdma"] == [
        ("rdma", tuple(f"{host}.g{rail}" for host in hosts), 50.0, 12.0) for rail in range(8)
    ]
    assert problem["shared"] == [
        {"dir": way, "gbps": gbps, "kinds": [kind], "each": "node"}
        for kind, gbps in (("nvlink", 450.0), ("rdma", 50.0))
        for way in ("egress", "ingress")
    ]
    assert problem["sources"] == [f"train.g{gpu}" for gpu in range(8)]
    assert problem["receivers"] == [f"h{host}.g{gpu}" for host in range(1, 5) for gpu in range(8)]
    assert problem["nodes"][9] == {"id": "h1.g1", "host": "h1", "kind": "engine", "nic": "nic1"}
    assert problem["payload_bytes"] == 64_000_000_000 and problem["notes"] == ""


@pytest.mark.skipif(not PLANS.is_dir(), reason="the plans' golden data is not here")
def test_the_rails_are_the_golden_problem_itself() -> None:
    golden = json.loads((PLANS / "03_rails_4_engine_hosts_x8.json").read_text())
    problem = read_cluster(rails()).problem()
    assert {node["id"]: node for node in problem["nodes"]} == {node["id"]: node for node in golden["nodes"]}
    assert pairs(problem) == pairs(golden) and problem["shared"] == golden["shared"]
    assert (problem["sources"], problem["receivers"]) == (golden["sources"], golden["receivers"])


def test_a_cluster_grows_by_its_engines() -> None:
    problem = read_cluster(rails()).with_engine_hosts(16).problem()
    assert len(problem["receivers"]) == 128 and problem["receivers"][-1] == "h16.g7"


def test_which_of_two_groups_grows_is_not_guessed() -> None:
    document = small()
    document["hosts"]["f"] = {"role": "engine"}
    with pytest.raises(ConfigError, match="2 groups are engines"):
        read_cluster(document).with_engine_hosts(3)


def test_one_nic_for_all_gpus_is_a_limit_of_the_host() -> None:
    group = {"gpus": 4, "nics": 1, "nic_gbit": 200}
    hosts = {"t": {"role": "trainer", **group}, "e": {"role": "engine", "count": 2, **group}}
    problem = read_cluster({"payload_gb": 1, "hosts": hosts}).problem()
    rdma = [limit for limit in problem["shared"] if limit["kinds"] == ["rdma"]]
    assert rdma == [{"dir": way, "gbps": 25.0, "kinds": ["rdma"], "each": "host"} for way in ("egress", "ingress")]


def test_nics_of_different_rates_are_limits_of_their_own() -> None:
    document = small()
    document["hosts"]["e"]["nic_gbit"] = 25
    problem = read_cluster(document).problem()
    limits = {(limit["host"], limit["nic"], limit["dir"]): limit["gbps"] for limit in problem["shared"]}
    assert limits == {("t", "nic0", way): 12.5 for way in ("egress", "ingress")} | {
        ("e", "nic0", way): 3.125 for way in ("egress", "ingress")
    }
    assert pairs(problem) == {("t", "e"): 12.5, ("e", "t"): 12.5}


def test_an_oversubscribed_core_is_one_limit_over_everybody() -> None:
    problem = read_cluster(small(networks={"rdma": {"oversubscription": 4}})).problem()
    assert {"dir": "egress", "gbps": 25 / 4, "kinds": ["rdma"]} in problem["shared"]


def test_gpus_wired_to_each_other_have_no_total() -> None:
    hosts = {
        "t": {"role": "trainer", "gpus": 4, "gpu_link": {"class": "NV4"}, "capability": 8.0},
        "e": {"role": "engine"},
    }
    wire = {"from": "t.g0", "to": "e", "kind": "wan", "gbps": 1, "alpha_us": 100}
    problem = read_cluster({"payload_gb": 1, "hosts": hosts, "links": [wire]}).problem()
    assert set(pairs(problem, "nvlink").values()) == {80.0} and len(pairs(problem, "nvlink")) == 12
    assert problem["shared"] == [] and pairs(problem, "wan") == {("t.g0", "e"): 1.0}
    assert "NV4: 80 GB/s" in problem["notes"] and "topo.h" in problem["notes"]


def test_pairs_without_nvlink_share_their_slot() -> None:
    links = {("GPU0", "GPU1"): "NV4", ("GPU0", "GPU2"): "SYS", ("GPU1", "GPU2"): "PIX"}
    host = Host("a", gpus=tuple(Gpu(f"GPU{i}") for i in range(3)), links=links, role="engine")
    trainer = Host("t", role="trainer")
    problem = to_problem(Topology((trainer, host)), 1, sources=["t"])
    pcie = {("a.g0", "a.g2"): 6.0, ("a.g2", "a.g0"): 6.0, ("a.g1", "a.g2"): 12.0, ("a.g2", "a.g1"): 12.0}
    assert pairs(problem, "pcie") == pcie
    egress = {limit["node"]: limit["gbps"] for limit in problem["shared"] if limit["dir"] == "egress"}
    assert egress == {"a.g0": 6.0, "a.g1": 12.0, "a.g2": 12.0}


def test_what_was_measured_replaces_what_was_assumed() -> None:
    topology = read_cluster(rails()).topology
    measured = {("train.g0", "h1.g0", "rdma"): Rate(41.5, 19.0)}
    problem = to_problem(topology, 10, measured=measured)
    plain = pairs(to_problem(topology, 10))
    assert pairs(problem) == plain | {("train.g0", "h1.g0"): 41.5}
    [link] = [link for link in problem["links"] if (link["src"], link["dst"]) == ("train.g0", "h1.g0")]
    assert link["alpha_us"] == 19.0


def test_hosts_that_nobody_described_are_joined_by_what_they_have() -> None:
    port = (Port(1, "ACTIVE", 200.0),)
    hosts = tuple(Host(name, nics=(Nic("mlx5_0", ports=port),)) for name in "te")
    problem = to_problem(Topology(hosts), 1, roles={"t": "trainer", "e": "engine"})
    assert pairs(problem) == {("t", "e"): 25.0, ("e", "t"): 25.0} and "latency of network rdma" in problem["notes"]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5), st.sampled_from([25, 100, 400])), min_size=2, max_size=5),
    st.sampled_from(["all", "rails"]),
    st.booleans(),
)
def test_every_problem_names_only_its_nodes_and_every_limit_covers_a_link(groups, scope: str, wired: bool) -> None:
    hosts = {
        f"x{at}": {
            "role": "engine" if at else "trainer",
            "gpus": gpus,
            "nics": nics,
            "nic_gbit": gbit,
            "ethernet_gbit": 10,
        }
        for at, (gpus, nics, gbit) in enumerate(groups)
    }
    networks = {"rdma": {"scope": scope}} | ({"tcp": {}} if wired else {})
    cluster = read_cluster({"payload_gb": 2, "hosts": hosts, "networks": networks})
    problem = cluster.problem()
    nodes = {node["id"]: node for node in problem["nodes"]}
    links = pairs(problem)
    assert {end for pair in links for end in pair} <= set(nodes)
    assert {*problem["sources"], *problem["receivers"]} <= set(nodes)
    assert len(nodes) == sum(max(1, gpus) for gpus, _, _ in groups)
    for limit in problem["shared"]:
        end = 0 if limit["dir"] == "egress" else 1
        covered = [
            pair
            for kind in limit["kinds"]
            for pair in pairs(problem, kind)
            if all(
                nodes[pair[end]].get(key.replace("node", "id")) == limit[key]
                for key in ("host", "node", "nic")
                if key in limit
            )
        ]
        assert covered or not {"host", "node", "nic", "each"} & set(limit)
    rail_of = {
        (host, nic): at
        for at, rail in enumerate(cluster.topology.rails())
        for host, nics in rail.items()
        for nic in nics
    }
    for ends in pairs(problem, "rdma"):
        places = [rail_of[nodes[end]["host"], nodes[end]["nic"]] for end in ends]
        assert scope == "all" or places[0] == places[1]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_cluster_can_be_planned(path: Path) -> None:
    problem = read_cluster_file(path).problem()
    reached, frontier = set(problem["sources"]), list(problem["sources"])
    links = pairs(problem)
    while frontier:
        here = frontier.pop()
        new = {dst for src, dst in links if src == here} - reached
        reached |= new
        frontier += new
    assert set(problem["receivers"]) <= reached and RECIPES


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], ["mapping"]),
        ({"payload_gb": 1}, ["hosts"]),
        (small(payload_gb=0), ["payload_gb", "greater than 0"]),
        (small(payload_gb="8 GB"), ["payload_gb", "8 GB"]),
        (small(payload_gb=float("inf")), ["payload_gb"]),
        (small(host={}), ["host", "hosts"]),
        (small(sharded="yes"), ["sharded", "yes"]),
        (small(sources=["t.g0"]), ["sources", "t.g0"]),
        (small(receivers=["x"]), ["receivers", "x"]),
        (small(networks={"rdma": {"scope": "rail"}}), ["networks.rdma.scope", "rails"]),
        (small(networks={"rdma": {"hosts": ["z"]}}), ["z"]),
        (small(networks={"tcp": {"scope": "rails"}}), ["networks.tcp.scope"]),
        (small(links=[{"from": "t", "to": "z", "kind": "wan", "gbps": 1, "alpha_us": 1}]), ["z"]),
        (small(links=[{"from": "t", "to": "e", "kind": "wan", "gbps": 1}]), ["links[0].alpha_us"]),
        (small(links={"a": 1}), ["links", "list"]),
        (small(limits=[{"dir": "out", "gbps": 1, "kinds": ["rdma"]}]), ["limits[0].dir", "egress"]),
        (small(limits=[{"dir": "egress", "gbps": 1}]), ["limits[0].kinds"]),
        (small(limits=[{"dir": "egress", "gbps": 1, "kinds": ["rdma"], "host": "z"}]), ["limits[0].host", "z"]),
        (small(hosts={"t": {"role": "boss"}}), ["hosts.t.role", "boss"]),
        (small(hosts={"t": {"role": "trainer", "gpus": -1}}), ["hosts.t.gpus"]),
        (small(hosts={"t": {"role": "trainer", "nics": 2}}), ["hosts.t.nic_gbit"]),
        (small(hosts={"t": {"role": "trainer", "count": 10**9}}), ["hosts.t.count"]),
        (
            small(hosts={"t": {"role": "trainer", "gpus": 2, "gpu_link": {"class": "NVLINK"}}}),
            ["hosts.t.gpu_link.class"],
        ),
        (small(hosts={"t": {"role": "trainer", "gpu": 2}}), ["hosts.t.gpu", "gpus"]),
        (small(hosts={"t": {"role": "trainer"}}), ["receivers", "engine"]),
        (small(hosts={"e": {"role": "engine"}}), ["sources", "trainer"]),
        (small(hosts={"e": {"role": "engine", "count": 1}, "e1": {"role": "trainer"}}), ["e1", "2 hosts"]),
    ],
)
def test_a_wrong_file_is_refused_with_the_key(document: object, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        read_cluster(document).problem()
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"a: [", b"a: &a [*a]", b"- 1", b"", b"hosts: {t: }"])
def test_a_file_that_is_no_cluster_is_refused_with_its_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        read_cluster_file(tmp_path / "c.yaml")


def test_a_host_whose_part_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="what it does is not known"):
        to_problem(Topology((Host("a"),)), 1)


def test_a_payload_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="payload of 0 bytes"):
        to_problem(read_cluster(small()).topology, 0)
