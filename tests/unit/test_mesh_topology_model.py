"""What follows from devices and links: the nearest NICs, the one to use, islands, rails."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.errors import ConfigError
from distill.transfermesh.topology import Gpu, Host, Nic, Port, Topology, prior, together
from distill.transfermesh.topology.classes import NEAREST_FIRST, distance

UP, DOWN = (Port(1, "ACTIVE", 100.0),), (Port(1, "DOWN", 100.0),)


def host(
    name: str = "a", gpus: int = 2, nics: int = 2, links: dict[tuple[str, str], str] | None = None, **more
) -> Host:
    return Host(
        name,
        gpus=tuple(Gpu(f"GPU{i}") for i in range(gpus)),
        nics=more.pop("ports", None) or tuple(Nic(f"n{i}", ports=UP) for i in range(nics)),
        links=links or {},
        **more,
    )


def test_classes_are_nearest_first() -> None:
    order = ["NV1", "PIX", "PXB", "PHB", "NODE", "SYS", "whatever"]
    assert [distance(link) for link in order] == sorted(distance(link) for link in order)
    assert distance("NV18") == distance("XGMI") < distance("PIX")


@given(st.dictionaries(st.integers(0, 9), st.sampled_from(NEAREST_FIRST), min_size=1))
def test_groups_of_nics_are_ordered_and_keep_the_column_order_inside(classes: dict[int, str]) -> None:
    links = {("GPU0", f"n{nic}"): link for nic, link in classes.items()}
    groups = host(gpus=1, nics=10, links=links).nics_by_distance("GPU0")
    found = [[classes[int(name[1:])] for name in group] for group in groups]
    assert all(len(set(group)) == 1 for group in found)
    assert [distance(group[0]) for group in found] == sorted({distance(link) for link in classes.values()})
    assert sorted(name for group in groups for name in group) == sorted(f"n{nic}" for nic in classes)
    assert all(list(group) == sorted(group) for group in groups)


def test_ties_are_dealt_out_in_turn() -> None:
    links = {(f"GPU{gpu}", f"n{nic}"): "PIX" for gpu in range(4) for nic in range(2)}
    assert host(gpus=4, links=links).serving_nics() == {"GPU0": "n0", "GPU1": "n1", "GPU2": "n0", "GPU3": "n1"}


def test_a_nic_that_is_down_serves_nobody() -> None:
    links = {("GPU0", "n0"): "PIX", ("GPU0", "n1"): "SYS", ("GPU1", "n0"): "PIX"}
    broken = host(links=links, ports=(Nic("n0", ports=DOWN), Nic("n1", ports=UP)))
    assert broken.nearest_nics("GPU0") == ("n0",)
    assert broken.serving_nics() == {"GPU0": "n1"}


@given(st.sets(st.sampled_from(list(combinations(range(6), 2)))))
def test_islands_are_the_connected_parts(joined: set[tuple[int, int]]) -> None:
    links = {(f"GPU{a}", f"GPU{b}"): "NV2" if (a, b) in joined else "PHB" for a, b in combinations(range(6), 2)}
    islands = host(gpus=6, links=links).islands()
    parts = [{gpu} for gpu in range(6)]
    for a, b in joined:
        ours, theirs = next(p for p in parts if a in p), next(p for p in parts if b in p)
        if ours is not theirs:
            parts.remove(theirs)
            ours |= theirs
    expected = sorted(sorted(part) for part in parts if len(part) > 1)
    assert [[int(name[3:]) for name in island] for island in islands] == expected


def near(gpus: int) -> dict[tuple[str, str], str]:
    return {(f"GPU{g}", f"n{n}"): "PIX" if g == gpus - 1 - n else "SYS" for g in range(gpus) for n in range(gpus)}


def test_rails_follow_the_gpus_and_not_the_numbers_of_the_nics() -> None:
    straight = {(f"GPU{g}", f"n{n}"): "PIX" if g == n else "SYS" for g in range(2) for n in range(2)}
    rails = Topology((host("a", links=straight), host("b", links=near(2)))).rails()
    assert rails == ({"a": ("n0",), "b": ("n1",)}, {"a": ("n1",), "b": ("n0",)})


def test_rails_are_subnets_where_these_are_known() -> None:
    nics = [
        tuple(Nic(f"n{i}", ports=(Port(1, "ACTIVE", 100.0, subnet=s),)) for i, s in enumerate(order))
        for order in ("xy", "yx")
    ]
    straight = {(f"GPU{g}", f"n{n}"): "PIX" if g == n else "SYS" for g in range(2) for n in range(2)}
    rails = Topology((host("a", links=straight, ports=nics[0]), host("b", links=straight, ports=nics[1]))).rails()
    assert rails == ({"a": ("n0",), "b": ("n1",)}, {"a": ("n1",), "b": ("n0",)})


def test_a_host_with_fewer_nics_is_in_fewer_rails() -> None:
    small = host("b", gpus=1, nics=1, links={("GPU0", "n0"): "PIX"})
    assert Topology((host("a", links=near(2)), small)).rails() == ({"a": ("n1",), "b": ("n0",)}, {"a": ("n0",)})


def test_a_host_that_two_processes_saw_is_there_once() -> None:
    seen = [
        Topology((host(name, identity=identity),)) for name, identity in [("a", "boot1"), ("a", "boot1"), ("b", "")]
    ]
    assert [each.name for each in together(seen).hosts] == ["a", "b"]


def test_two_hosts_of_the_same_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 hosts are called 'a'"):
        together([Topology((host("a", identity="boot1"),)), Topology((host("a", identity="boot2"),))])


@pytest.mark.parametrize(
    ("link", "capability", "gbps"),
    [
        ("NV18", 9.0, 370.8),
        ("NV18", 10.0, 721.8),
        ("NV12", 8.0, 240.0),
        ("NV4", None, 80.0),
        ("NV18", 12.0, 721.8),
        ("PIX", None, 12.0),
        ("SYS", None, 6.0),
    ],
)
def test_what_is_assumed_of_a_link_has_a_rate_and_a_source(link: str, capability: float | None, gbps: float) -> None:
    assumed = prior(link, capability)
    assert assumed.rate.gbps == pytest.approx(gbps) and "topo.h" in assumed.source and assumed.rate.alpha_us > 0
