"""Who may come in: keys on every route, odd paths, odd hosts, pages elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from reference.live_server import Live, serving
from reference.safety_tools import ALICE, KEYS, client_of, is_openai_error, post_bytes, wire
from reference.tiny import Tiny

from forerun.cli import main


@pytest.fixture(scope="module")
def locked(tiny: Tiny) -> Iterator[Live]:
    with serving(tiny.folder, server={"api_keys": KEYS}) as running:
        yield running
        running.check_idle()


def routes_of(live: Live) -> list[tuple[str, str]]:
    router = live.server.config.app._app._router
    return [
        (method, route.path.replace("{name:path}", "tiny"))
        for route in router.routes
        for method in sorted(route.methods)
    ]


# S1


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org"])
def test_listening_to_others_without_a_key_is_refused_at_once(
    host: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORERUN_API_KEY", raising=False)
    code = main(["serve", "--model", "/nowhere", "--host", host, "--port", "0"])
    said = capsys.readouterr().err
    assert code == 2
    assert host in said
    assert "API key" in said
    assert "--insecure" in said
    assert "/nowhere" not in said, "it looked for the model first"


def test_the_same_as_people_do_it(tiny: Tiny) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "FORERUN_API_KEY"}
    done = subprocess.run(
        [sys.executable, "-m", "forerun", "serve", "--model", str(tiny.folder),
         "--host", "0.0.0.0", "--port", "0"],
        capture_output=True, text=True, timeout=120, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "API key" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_option_takes_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    """S3: a command line can be read by every user of a machine."""
    assert main(["serve", "--model", "/nowhere", "--api-key", "secret-key-1"]) == 2
    assert "secret-key-1" not in capsys.readouterr().err


# S2


def test_every_route_wants_a_key(locked: Live) -> None:
    seen = set()
    with client_of(locked) as client:
        for method, path in routes_of(locked):
            answer = client.request(method, path)
            if path in ("/health", "/ready"):
                assert answer.status_code == 200, path
                continue
            seen.add(path)
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"].startswith(("Bearer", "Basic"))
            if method != "HEAD":
                assert is_openai_error(answer)
                assert answer.json()["error"]["code"] == "invalid_api_key"
    assert {"/", "/metrics", "/tokenize", "/v1/responses", "/openapi.json"} <= seen
    assert {"/dashboard/state", "/dashboard/main.js", "/tokenizer_info"} <= seen


def test_every_route_opens_to_a_key(locked: Live) -> None:
    with client_of(locked, ALICE) as client:
        for method, path in routes_of(locked):
            answer = client.request(method, path)
            assert answer.status_code in (200, 400, 415), (method, path)


@pytest.mark.parametrize(
    "method", ["OPTIONS", "TRACE", "PUT", "DELETE", "PATCH", "CONNECT", "PROPFIND", "get"]
)
def test_no_method_opens_a_door(locked: Live, method: str) -> None:
    for path in ("/v1/models", "/metrics", "/", "/nothing"):
        with wire(locked) as connection:
            connection.ask(f"{method} {path}", "Connection: close")
            assert connection.reply(method).status in (400, 401)


ODD_TARGETS = [
    "//v1/models", "/v1//models", "/./v1/models", "/health/../v1/models",
    "/health/%2e%2e/v1/models",
    "/%2e%2e/v1/models", "/v1/models/", "/V1/MODELS", "/v1/%6dodels", "/%76%31/models",
    "/v1%2fmodels", "/health%2f..%2fv1%2fmodels", "/v1/models?x=/health", "/v1/models#/health",
    "/v1/models;/health", "/health;/v1/models", "/health/", "/HEALTH", "/health%00", "/health%20",
    "/ready/x", "/metrics/", "/METRICS", "/dashboard/", "/dashboard/..%2f..%2fv1/models", "*",
    "http://localhost/health", "http://localhost/v1/models", "https://x@localhost/v1/models",
    "http://evil.example/v1/models", "health", "?/health", "/\\v1/models", "/%5cv1/models",
    "/v1/models%0d%0aX:%20y", "/%c0%af/v1/models", "/%ff", "/v1/models/%2e%2e/%2e%2e/health",
]  # fmt: skip


@pytest.mark.parametrize("target", ODD_TARGETS)
def test_no_spelling_of_a_path_opens_a_door(locked: Live, target: str) -> None:
    with wire(locked) as connection:
        connection.ask(f"GET {target}", "Connection: close")
        reply = connection.reply()
        assert reply.status in (400, 401), target
        assert b"max_model_len" not in reply.body
    with wire(locked) as connection:  # with a key the same path gives what it gives, and no 5xx
        connection.ask(f"GET {target}", f"Authorization: Bearer {ALICE}", "Connection: close")
        assert connection.reply().status < 500


@pytest.mark.parametrize(
    "headers",
    [
        ["X-Original-URL: /health"],
        ["X-Rewrite-URL: /health"],
        ["X-Forwarded-Prefix: /health"],
        ["X-Forwarded-For: 127.0.0.1"],
        ["X-HTTP-Method-Override: HEAD"],
        ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13",
         "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="],
        ["Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAMAAABkAAQAAP__"],
        ["Authorization: Bearer"],
        ["Authorization: Bearer wrong-key-123"],
        [f"Authorization: Bearer {ALICE}x"],
        [f"Authorization: {ALICE}"],
        [f"Authorization: Bearer {ALICE}", "Authorization: Bearer other"],
        [f"X-Api-Key: {ALICE}x"],
        [f"Cookie: key={ALICE}"],
    ],
)  # fmt: skip
def test_no_header_opens_a_door(locked: Live, headers: list[str]) -> None:
    with wire(locked) as connection:
        connection.ask("GET /v1/models", *headers)
        assert connection.reply().status == 401


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost:1/health?", "localhost/health?x=", "127.0.0.1/health#",
             "x@localhost", "localhost:99999999", "", "[::1", "localhost.evil.example",
             "127.0.0.1.nip.io"],
)  # fmt: skip
def test_no_host_opens_a_door(locked: Live, host: str) -> None:
    """Starlette makes URLs from Host; whoever decides on them can be led astray."""
    for path in ("/v1/models", "/metrics"):
        with wire(locked) as connection:
            connection.ask(f"GET {path}", f"Host: {host}", host=None)
            assert connection.reply().status in (400, 401, 421)


def test_the_root_path_does_not_open_a_door(locked: Live) -> None:
    from reference.safety_tools import wait_until

    config = locked.server.config
    config.root_path = "/health"
    try:
        wait_until(lambda: config.root_path == "/health")
        with wire(locked) as connection:
            connection.ask("GET /v1/models")
            assert connection.reply().status == 401
    finally:
        config.root_path = ""


def test_an_old_client_without_host_gets_in_nowhere(locked: Live) -> None:
    with wire(locked) as connection:
        connection.send("GET /v1/models HTTP/1.0\r\n\r\n")
        assert connection.reply().status in (400, 401, 421)


def test_a_browser_may_send_the_key_as_a_password(locked: Live) -> None:
    answer = httpx.get(f"{locked.url}/", auth=("anyone", ALICE))
    assert answer.status_code == 200
    assert httpx.get(f"{locked.url}/", auth=(ALICE, "wrong")).status_code == 401
    assert httpx.get(f"{locked.url}/").headers["www-authenticate"].startswith("Basic")


def test_the_door_is_shut_before_the_body_comes(locked: Live) -> None:
    """Nobody without a key makes the server hold 4 MB."""
    with wire(locked) as connection:
        connection.ask("POST /v1/chat/completions", "Content-Length: 4000000")
        assert connection.reply().status == 401


def test_public_metrics_open_that_route_only(tiny: Tiny) -> None:
    with serving(tiny.folder, server={"api_keys": KEYS, "public_metrics": True}) as live:
        for path, status in (
            ("/metrics", 200),
            ("/metrics/", 401),
            ("/v1/models", 401),
            ("/", 401),
        ):
            assert httpx.get(live.url + path).status_code == status


# S4


REBOUND = ["evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.nip.io",
    "0.0.0.0",
           "localhost@evil.example", "localhost:80:80", "", "[::]", "2130706433", "LOCALHOST.",
           "169.254.169.254"]  # fmt: skip


@pytest.mark.parametrize("host", REBOUND)
@pytest.mark.parametrize("path", ["/", "/v1/models", "/health", "/metrics"])
def test_a_name_made_to_point_here_is_refused(live: Live, host: str, path: str) -> None:
    with wire(live) as connection:
        connection.ask(f"GET {path}", f"Host: {host}", host=None)
        reply = connection.reply()
        assert reply.status in (400, 421)
        if reply.status == 421:
            assert reply.json()["error"]["code"] == "wrong_host"


@pytest.mark.parametrize("host", ["localhost", "LocalHost:1234", "127.0.0.1", "[::1]:80"])
def test_our_own_names_are_taken(live: Live, host: str) -> None:
    with wire(live) as connection:
        connection.ask("GET /v1/models", f"Host: {host}", host=None)
        assert connection.reply().status == 200


def test_allowed_hosts_are_taken(tiny: Tiny) -> None:
    with serving(tiny.folder, server={"allowed_hosts": ("Llm.Example",)}) as live:
        for host, status in (("llm.example:8000", 200), ("evil.example", 421)):
            with wire(live) as connection:
                connection.ask("GET /v1/models", f"Host: {host}", host=None)
                assert connection.reply().status == status


def test_another_loopback_address_can_be_used(tiny: Tiny) -> None:
    with serving(tiny.folder, server={"host": "127.0.0.2"}) as live:
        assert httpx.get(f"{live.url}/health").status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:1"])
def test_no_page_elsewhere_may_read(live: Live, origin: str) -> None:
    with client_of(live) as client:
        for method, path in routes_of(live):
            answer = client.request(method, path, headers={"Origin": origin})
            for name in answer.headers:
                assert not name.startswith("access-control-"), (method, path)
        answer = client.options(
            "/v1/chat/completions",
            headers={"Origin": origin, "Access-Control-Request-Method": "POST"},
        )
        assert answer.status_code >= 400
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_no_page_elsewhere_may_make_us_work(live: Live, kind: str | None) -> None:
    """A page can post without asking (no preflight) unless the type must be JSON; a Blob without a
    type is sent with none."""
    body = json.dumps({"prompt": "a", "max_tokens": 4}).encode()
    with wire(live) as connection:
        headers = ["Origin: http://evil.example", "Sec-Fetch-Site: cross-site",
                   f"Content-Length: {len(body)}"]  # fmt: skip
        headers += [f"Content-Type: {kind}"] if kind else []
        connection.ask("POST /v1/completions", *headers)
        connection.send(body)
        assert 400 <= connection.reply().status < 500


def test_every_answer_has_the_safe_headers(live: Live) -> None:
    with client_of(live) as client:
        answers = [client.request(method, path) for method, path in routes_of(live)]
        answers.append(client.get("/nothing"))
        answers.append(client.post("/v1/completions", json={"prompt": "a", "stream": True}))
        answers.append(client.post("/v1/completions", content=b"{"))
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert "server" not in answer.headers
        assert answer.headers["x-request-id"]


def test_names_that_look_like_tags_stay_data(tiny: Tiny) -> None:
    """Whatever a name holds, answers are JSON that no browser takes for a page."""
    name = "<script>alert(1)</script>"
    with serving(tiny.folder, server={"model_names": (name,)}) as live, client_of(live) as client:
        for path in ("/v1/models", "/dashboard/state", "/v1/models/<img src=x onerror=alert(1)>"):
            answer = client.get(path)
            assert answer.headers["content-type"] == "application/json"
        assert name not in client.get("/").text
        assert client.get("/metrics").headers["content-type"].startswith("text/plain")


# S11


@pytest.mark.parametrize(
    "path",
    ["/dashboard/../keys.py", "/dashboard/%2e%2e/keys.py", "/dashboard/..%2fkeys.py", "/dashboard/",
     "/dashboard/....//keys.py", "/dashboard/..\\keys.py", "/dashboard/%2fetc%2fpasswd",
     "/dashboard",
     "/dashboard//etc/passwd", "/dashboard/main.js%00.html", "/dashboard/main.js/../../keys.py",
     "/dashboard/%252e%252e/keys.py", "/dashboard/..%c0%afkeys.py", "/dashboard/__init__.py",
     "/dashboard/.", "/dashboard/~root", "/dashboard/file:///etc/passwd",
     "/v1/models/../../etc/passwd",
     "/etc/passwd", "//etc/passwd", "/..%2f..%2f..%2fetc/passwd"],
)  # fmt: skip
def test_no_path_leads_out_of_the_page(live: Live, path: str) -> None:
    with wire(live) as connection:
        connection.ask(f"GET {path}")
        reply = connection.reply()
        assert reply.status in (400, 404)
        assert b"root:" not in reply.body
        assert b"def find_key" not in reply.body


def test_a_key_unlocks_the_api(locked: Live) -> None:
    with wire(locked) as connection:
        body = {"prompt": "the quick", "max_tokens": 4}
        connection.send(
            post_bytes("/v1/completions", body, locked, f"Authorization: Bearer {ALICE}")
        )
        assert connection.reply().status == 200
