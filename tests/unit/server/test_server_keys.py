"""API keys: what files may hold, whose a key is, and that none is ever shown."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from forerun.errors import ConfigError, UnknownOption
from forerun.server import keys
from forerun.server.config import ServerConfig
from forerun.server.keys import ApiKey, find_key, parse_keys, read_keys


def test_a_file_of_keys() -> None:
    text = """
        # who may ask
        justakey123            # no name
        alice alicekey1
        bob   bobskey12  3
    """
    found = parse_keys(text, "file")
    assert [(each.name, each.max_requests) for each in found] == [
        ("key3", None), ("alice", None), ("bob", 3),
    ]  # fmt: skip
    assert find_key(found, "alicekey1") is found[1]
    assert find_key(found, "bobskey12") is found[2]
    assert find_key(found, "justakey123") is found[0]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("a b c d", "line 1 of file has 4 words"),
        ("bob bobskey12 none", "line 1 of file: 'none'"),
        ("bob bobskey12 0", "'0'"),
        ("bob bobskey12 -1", "'-1'"),
        ("bob bobskey12 \u0663", "no number"),
        ("bob bobskey12 1.5", "'1.5'"),
        ("ok okkey1234\nbob short", "'bob'"),
        ("bob bobskey12\nbob bobskey34", "line 2.*'bob'"),
        ("bob samesame1\nalice samesame1", "line 2.*'alice'"),
        ("bob k\u00e4y\u00e4y\u00e4y\u00e4", "printable ASCII"),
        ("bob \x01\x02\x03\x04\x05\x06\x07\x08", "printable ASCII"),
        ("", "holds no API key"),
        ("# nothing\n\n", "holds no API key"),
    ],
)
def test_bad_lines_are_refused_by_number(text: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        parse_keys(text, "file")


@pytest.mark.parametrize(
    "text", ["ok okkey1234\nbob short77", "x samesame1\ny samesame1", "a b c d"]
)
def test_a_complaint_never_shows_a_key(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_keys(text, "file")
    for word in ("short77", "samesame1", "okkey1234"):
        assert word not in str(caught.value)


def test_a_key_is_not_cut_at_a_hash_in_silence() -> None:
    """`#` begins a comment only after white space; half a key would be the easier to guess."""
    try:
        (found,) = parse_keys("bob longenough#and-the-rest", "file")
    except ConfigError:
        return
    assert find_key([found], "longenough") is None


def test_files_and_the_environment_add_up(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("alice alicekey1\n")
    found = read_keys(path, "envkey123, bob bobskey12 2")
    assert len(found) == 3
    assert find_key(found, "envkey123") is not None
    assert find_key(found, "bobskey12").max_requests == 2
    assert read_keys(None, None) == read_keys(None, "") == ()


def test_keys_of_both_sources_are_told_apart(tmp_path: Path) -> None:
    """Limits and logs go by name: two keys with one name would share them."""
    path = tmp_path / "keys"
    path.write_text("filekey12\n")
    found = read_keys(path, "envkey123")
    assert len({each.name for each in found}) == 2


def test_a_key_of_both_sources_has_one_limit(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("alice samesame1 1\n")
    with pytest.raises(ConfigError):
        read_keys(path, "bob samesame1 9")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "none", None)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "bytes", None)


def test_a_key_is_kept_as_a_digest_and_never_shown() -> None:
    key = ApiKey.of("very-secret-key", "alice")
    assert "very-secret-key" not in repr(key)
    assert key.digest.hex() not in repr(key)
    assert "very-secret-key" not in str(dataclasses.astuple(key))


@pytest.mark.parametrize("presented", ["", "alice", "ALICEKEY1", "alicekey1 ", "\0", "\ud800", "ä"])
def test_nothing_but_the_key_is_the_key(presented: str) -> None:
    assert find_key(parse_keys("alice alicekey1", "file"), presented) is None


def test_all_keys_are_compared_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3: constant time over all keys, by `compare_digest` on digests of one length."""
    found = parse_keys("a aaaaaaaa1\nb bbbbbbbb1\nc cccccccc1", "file")
    compared: list[tuple[bytes, bytes]] = []
    real = keys.secrets.compare_digest

    def compare(one: bytes, two: bytes) -> bool:
        compared.append((one, two))
        return real(one, two)

    monkeypatch.setattr(keys.secrets, "compare_digest", compare)
    for presented in ("aaaaaaaa1", "cccccccc1", "nobody's-key", ""):
        compared.clear()
        find_key(found, presented)
        assert len(compared) == 3
        assert {len(each) for pair in compared for each in pair} == {32}


NAMED = {"model_names": ("m",)}


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "192.168.1.7", "example.org", "", "0", "ip6-all"]
)
def test_others_need_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="no API key"):
        ServerConfig(**NAMED, host=host)
    key = ApiKey.of("alicekey1", "alice")
    assert ServerConfig(**NAMED, host=host, api_keys=(key,)).host == host
    assert ServerConfig(**NAMED, host=host, insecure=True).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_this_machine_alone_needs_none(host: str) -> None:
    assert ServerConfig(**NAMED, host=host).is_loopback


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": -1}, {"port": 65536}, {"port": "80"}, {"port": True}, {"max_body_bytes": 10},
        {"max_samples": 0}, {"max_prompts": 10**6}, {"request_timeout_s": 0},
        {"queue_timeout_s": -1.0}, {"drain_timeout_s": float("nan")}, {"ping_s": float("inf")},
        {"stream_padding": -1}, {"metrics_compat": "sglang"}, {"model_names": ()},
        {"model_names": ("",)},
    ],
)  # fmt: skip
def test_settings_are_checked(wrong: dict) -> None:
    with pytest.raises(ConfigError):
        ServerConfig(**NAMED | wrong)


def test_an_unknown_setting_is_an_error() -> None:
    with pytest.raises(UnknownOption, match="max_body_bytes"):
        ServerConfig(**NAMED, max_body_byte=1)
