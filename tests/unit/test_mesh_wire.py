"""Nobody without the key is heard, and nobody with it can make a receiver do more than take weights."""

from __future__ import annotations

import dataclasses
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.errors import MeshError
from distill.transfermesh import Manifest, MemoryLoader, TensorSpec, model_digest, tensor_digest
from distill.transfermesh.auth import dial, run_id
from distill.transfermesh.digest import bucket_digest
from distill.transfermesh.link import Deadline, Link, receive_all
from distill.transfermesh.transports.shm import Segment
from distill.transfermesh.wire import (
    MAC_BYTES,
    MAGIC,
    MAX_HEADER,
    PREFIX,
    Abort,
    Ack,
    Challenge,
    Chunk,
    Commit,
    End,
    Failed,
    Hello,
    Offer,
    Proof,
    Ready,
    Slice,
    Staged,
    decode,
    decode_greeting,
    encode,
    header_length,
)
from tests.builders_mesh import KEY, endpoints, model, publisher, receivers, same

OTHER_KEY = b"the key of another run, as long"
MANIFEST = Manifest(3, (TensorSpec("a", "int8", (100,), 100), TensorSpec("b", "float32", (5,), 20)))
CHUNK = Chunk(0, [Slice(0, 0, 100), Slice(1, 0, 20)], 148, "0" * 16)


@given(st.binary(max_size=300))
def test_a_decoder_refuses_any_bytes_that_are_not_a_message(data):
    for parse in (decode, decode_greeting):
        with pytest.raises(MeshError):
            parse(data)


@given(st.sampled_from([CHUNK, Offer("tcp", 1024, MANIFEST), End("0" * 32, 1), Hello(b"n" * 32)]), st.data())
@settings(max_examples=300)
def test_a_damaged_message_is_another_valid_message_or_refused(message, data):
    header = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(header[: data.draw(st.integers(0, len(header)))])
    for parse in (decode, decode_greeting):
        try:
            read = parse(cut)
        except MeshError:
            continue
        assert parse(encode(read)) == read


@pytest.mark.parametrize(
    "header",
    [
        encode(CHUNK).replace(b"0" * 16, b"g" * 16),
        encode(Chunk(-1, [Slice(0, 0, 1)], 1, "0" * 16)),
        encode(Chunk(0, [], 0, "0" * 16)),
        encode(Chunk(0, [Slice(0, -1, 1)], 1, "0" * 16)),
        encode(Chunk(0, [Slice(0, 0, 1)], 1 << 40, "0" * 16)),
        encode(Offer("tcp", 1 << 50, MANIFEST)),
        encode(Offer("tcp", 1024, Manifest(-1, ()))),
        encode(Offer("tcp", 1024, Manifest(1, (TensorSpec("a", "int8", (-5,), 5),)))),
        encode(Offer("tcp", 1024, Manifest(1, (TensorSpec("a", "int8", (1,) * 33, 1),)))),
        b"\x82\xa4type\xa5chunk\xa6slices\xdd\xff\xff\xff\xff",
    ],
)
def test_values_out_of_bounds_are_refused_by_the_decoder(header):
    with pytest.raises(MeshError, match="broken frame"):
        decode(header)


def test_an_overlong_or_foreign_prefix_is_refused_before_anything_is_allocated():
    with pytest.raises(MeshError, match="longer than"):
        header_length(PREFIX.pack(MAGIC, MAX_HEADER + 1), MAX_HEADER)
    with pytest.raises(MeshError, match="does not speak"):
        header_length(b"GET / HT", MAX_HEADER)


def test_a_long_reason_is_cut_so_that_it_can_be_read():
    assert len(decode(encode(Failed("x" * 100_000))).reason) == 4000


def test_a_publisher_of_another_run_reaches_nobody():
    loader = MemoryLoader()
    with receivers({"a": loader}) as started, publisher(key=OTHER_KEY) as stranger, publisher() as made:
        report = stranger.publish(model(), 9, endpoints(started))
        assert "does not hold this run's key" in report.failed["a"]
        assert (started[0].version, loader.tensors) == (-1, {})
        assert made.publish(model(), 1, endpoints(started)).committed == ("a",)


def raw(endpoint) -> socket.socket:
    return socket.create_connection((endpoint.host, endpoint.port), timeout=10)


def say(sock: socket.socket, header: bytes, more: bytes = b"") -> None:
    sock.sendall(PREFIX.pack(MAGIC, len(header)) + header + more)


def hear(sock: socket.socket) -> bytes:
    prefix = bytearray(PREFIX.size)
    receive_all(sock, memoryview(prefix), Deadline(10), "prefix")
    header = bytearray(PREFIX.unpack(prefix)[1])
    receive_all(sock, memoryview(header), Deadline(10), "header")
    return bytes(header)


def test_a_receiver_hangs_up_on_a_peer_that_cannot_prove_the_key(caplog):
    with receivers({"a": MemoryLoader()}) as started, raw(started[0].endpoint) as sock:
        say(sock, encode(Hello(b"n" * 32)))
        challenge = decode_greeting(hear(sock))
        assert isinstance(challenge, Challenge)
        say(sock, encode(Proof(challenge.proof)))  # the receiver's own proof, sent back
        assert sock.recv(1) == b""
    assert "the peer does not hold this run's key" in caplog.text


@pytest.mark.parametrize(
    "noise", [b"GET / HTTP/1.1\r\n\r\n", PREFIX.pack(MAGIC, 1 << 31), PREFIX.pack(MAGIC, 3) + b"abc"]
)
def test_a_receiver_hangs_up_on_noise(noise):
    with receivers({"a": MemoryLoader()}) as started, raw(started[0].endpoint) as sock:
        sock.sendall(noise)
        assert sock.recv(1) == b""


def test_silent_strangers_do_not_hold_up_the_publisher():
    with receivers({"a": MemoryLoader()}) as started, publisher() as made:
        strangers = [raw(started[0].endpoint) for _ in range(5)]
        assert made.publish(model(), 1, endpoints(started)).committed == ("a",)
        for sock in strangers:
            sock.close()


def test_another_receiver_on_a_recycled_port_is_noticed():
    with receivers({"b": MemoryLoader()}) as started, publisher() as made:
        report = made.publish(model(), 1, [dataclasses.replace(started[0].endpoint, name="a")])
        assert "'b' answers where a at" in report.failed["a"]


@pytest.fixture
def pair():
    """Two ends of an authenticated connection, and the raw socket of the first."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname(), timeout=5)
        right, _ = server.accept()
    sender, receiver = Link(left, "left", b"1" * 32, b"2" * 32, 5), Link(right, "right", b"2" * 32, b"1" * 32, 5)
    yield sender, receiver, left
    sender.close()
    receiver.close()


def test_a_frame_with_a_wrong_mac_is_refused(pair):
    _, receiver, left = pair
    say(left, encode(Abort("x")), b"\0" * MAC_BYTES)
    with pytest.raises(MeshError, match="not authentic"):
        receiver.receive(Abort)


def test_a_frame_that_is_sent_again_is_refused(pair):
    _, receiver, left = pair
    header = encode(Ack(1))
    frame = Link._mac(b"1" * 32, 0, header)
    say(left, header, frame)
    assert receiver.receive(Ack) == Ack(1)
    say(left, header, frame)
    with pytest.raises(MeshError, match="not authentic"):
        receiver.receive(Ack)


def test_a_frame_of_one_direction_is_refused_in_the_other(pair):
    _, receiver, left = pair
    header = encode(Ack(1))
    say(left, header, Link._mac(b"2" * 32, 0, header))
    with pytest.raises(MeshError, match="not authentic"):
        receiver.receive(Ack)


def test_a_frame_cut_short_is_an_error_and_not_an_end(pair):
    _, receiver, left = pair
    left.sendall((PREFIX.pack(MAGIC, 50) + b"half of it")[:-3])
    left.shutdown(socket.SHUT_WR)
    with pytest.raises(MeshError, match="the stream ended before the rest of a frame"):
        receiver.receive(Ack)


def test_silence_is_an_error_with_its_length(pair):
    sender, *_ = pair
    sender.timeout_s = 0.2
    with pytest.raises(MeshError, match=r"left did not send a frame within 0\.2 s"):
        sender.receive(Ack)


GOOD = bytes(range(100)), bytes(range(20))
GOOD_DIGEST = bucket_digest(GOOD)
PAYLOAD = GOOD[0] + bytes(28) + GOOD[1]

WRONG_CHUNKS = {
    "damaged": (Chunk(0, [Slice(0, 0, 100), Slice(1, 0, 20)], 148, "f" * 16), "arrived damaged"),
    "wrong order": (Chunk(0, [Slice(1, 0, 20), Slice(0, 0, 100)], 228, GOOD_DIGEST), "was due"),
    "gap": (Chunk(0, [Slice(0, 10, 90)], 90, GOOD_DIGEST), "was due"),
    "overlap": (Chunk(0, [Slice(0, 0, 60), Slice(0, 50, 50)], 114, GOOD_DIGEST), "was due"),
    "beyond the tensor": (Chunk(0, [Slice(0, 0, 101)], 101, GOOD_DIGEST), "not a slice of 101"),
    "beyond the manifest": (Chunk(0, [Slice(0, 0, 100), Slice(1, 0, 20), Slice(2, 0, 0)], 192, GOOD_DIGEST), "was due"),
    "no progress": (Chunk(0, [Slice(0, 0, 0)], 0, GOOD_DIGEST), "not a slice of 0"),
    "more bytes than slices": (Chunk(0, [Slice(0, 0, 100)], 1 << 30, GOOD_DIGEST), "its slices need 100"),
    "a later bucket": (Chunk(1, [Slice(0, 0, 100)], 100, GOOD_DIGEST), "where 0 was due"),
}
WRONG_SEGMENTS = {
    "a path": (Chunk(0, [Slice(0, 0, 100)], 100, GOOD_DIGEST, "../../etc/passwd"), "not a segment of this run"),
    "another run's": (
        Chunk(0, [Slice(0, 0, 100)], 100, GOOD_DIGEST, "distill-mesh-" + "0" * 16 + "-1-1"),
        "not a segment",
    ),
    "one that is not there": (
        Chunk(0, [Slice(0, 0, 100)], 100, GOOD_DIGEST, f"distill-mesh-{run_id(KEY)}-1-1"),
        "cannot map the publisher's segment: .*No such file.*mesh.transport=tcp",
    ),
    "none": (Chunk(0, [Slice(0, 0, 100)], 100, GOOD_DIGEST), "not a segment of this run"),
}


@pytest.mark.parametrize("case", WRONG_CHUNKS)
def test_a_publisher_gone_wrong_is_refused_by_its_bucket(case):
    chunk, reason = WRONG_CHUNKS[case]
    refused("tcp", chunk, reason)


@pytest.mark.parametrize("case", WRONG_SEGMENTS)
def test_a_receiver_maps_only_segments_of_its_own_run(case):
    chunk, reason = WRONG_SEGMENTS[case]
    refused("shm", chunk, reason)


def test_a_bucket_beyond_the_end_of_its_segment_is_refused():
    segment = Segment(run_id(KEY), 4096)
    try:
        refused("shm", Chunk(0, [Slice(0, 0, 100)], 100, GOOD_DIGEST, segment.name, 4000), "is outside of segment")
    finally:
        segment.close()


def refused(transport: str, chunk: Chunk, reason: str) -> None:
    """The bucket ends the update with `reason`; what was live stays live, and the next publish works."""
    loader = MemoryLoader()
    with receivers({"a": loader}) as started, publisher() as made:
        made.publish(model(1), 1, endpoints(started))
        link = dial(started[0].endpoint, KEY, 20)
        try:
            link.send(Offer(transport, 1024, MANIFEST))
            link.receive(Ready)
            link.send(chunk, [memoryview(PAYLOAD)] if transport == "tcp" else [])
            with pytest.raises(MeshError, match=reason):
                link.receive(Ack)
        finally:
            link.close()
        assert same(loader, model(1))
        assert made.publish(model(2), 2, endpoints(started)).committed == ("a",)


@pytest.mark.parametrize("ending", ["early end", "commit without end", "wrong digest", "hang up", "other version"])
def test_nothing_is_committed_that_was_not_received_whole_and_agreed_on(ending):
    loader = MemoryLoader()
    right = model_digest({"a": tensor_digest(GOOD[0]), "b": tensor_digest(GOOD[1])})
    with receivers({"a": loader}) as started, publisher() as made:
        made.publish(model(1), 1, endpoints(started))
        link = dial(started[0].endpoint, KEY, 20)
        link.send(Offer("tcp", 1024, MANIFEST))
        link.receive(Ready)
        if ending == "early end":
            link.send(End(right, 0))
        else:
            link.send(Chunk(0, [Slice(0, 0, 100), Slice(1, 0, 20)], 148, GOOD_DIGEST), [memoryview(PAYLOAD)])
            link.receive(Ack)
            if ending in ("wrong digest", "other version"):
                link.send(End(right if ending == "other version" else "0" * 32, 1))
                assert link.receive(Staged).digest == right
            if ending != "hang up":
                link.send(Commit(4 if ending == "other version" else 3))
        if ending != "hang up":
            with pytest.raises(MeshError):
                link.receive(Ack)
        link.close()
        assert same(loader, model(1)) and started[0].version == 1
        assert made.publish(model(2), 2, endpoints(started)).committed == ("a",)


@pytest.mark.parametrize(
    ("offer", "reason"),
    [
        (Offer("tcp", 1024, Manifest(3, (TensorSpec("a", "int8", (4,), 5),))), "5 bytes are not int8"),
        (Offer("tcp", 1024, Manifest(3, (TensorSpec("a", "int8", (4,), 4),) * 2)), "there twice"),
        (Offer("os:system", 1024, MANIFEST), "no transport 'os:system' here"),
        (Offer("tcp", 1024, Manifest(3, (TensorSpec("a", "object", (4,), 4),))), "unknown dtype"),
    ],
)
def test_an_offer_that_cannot_be_right_is_refused(offer, reason):
    with receivers({"a": MemoryLoader()}) as started:
        link = dial(started[0].endpoint, KEY, 20)
        link.send(offer)
        with pytest.raises(MeshError, match=reason):
            link.receive(Ready)
        link.close()


def test_an_offer_larger_than_the_memory_is_refused_and_not_fatal():
    huge = Manifest(3, (TensorSpec("a", "int8", (1 << 46,), 1 << 46),))
    with receivers({"a": MemoryLoader()}) as started, publisher() as made:
        link = dial(started[0].endpoint, KEY, 20)
        link.send(Offer("tcp", 1024, huge))
        with pytest.raises(MeshError, match=r"begin failed: .*MemoryError"):
            link.receive(Ready)
        link.close()
        assert made.publish(model(), 1, endpoints(started)).committed == ("a",)


def test_the_model_digest_depends_on_names_and_bytes_and_on_nothing_else():
    digests = {"a": tensor_digest(b"1"), "b": tensor_digest(b"2")}
    assert model_digest(digests) == model_digest(dict(reversed(digests.items())))
    assert (
        len({model_digest(d) for d in (digests, {"a": digests["a"]}, {"a": digests["b"], "b": digests["a"]}, {})}) == 4
    )
    assert (len(tensor_digest(b"")), len(model_digest({}))) == (16, 32)


def test_twenty_receivers_start_at_once_on_ports_of_their_own():
    with receivers({f"r{index}": MemoryLoader() for index in range(20)}) as started, publisher() as made:
        assert len({receiver.endpoint.port for receiver in started}) == 20
        assert len(made.publish(model(), 1, endpoints(started)).committed) == 20
