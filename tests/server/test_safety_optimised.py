"""S12: under `python -O`, which drops every assert, the same things are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from reference.tiny import Tiny

TESTS = Path(__file__).parents[1]

# Runs in a process of its own. It says what was answered; whether that is right, the test says.
SCRIPT = """
import json, sys
if __debug__:
    sys.exit("asserts are still on")
from reference.live_server import serving
from reference.safety_tools import ALICE, KEYS, ask, client_of, post_bytes

from forerun.errors import ConfigError
from forerun.server.config import ServerConfig

answers = {}
try:
    ServerConfig(model_names=("tiny",), host="0.0.0.0")
except ConfigError as error:
    answers["open to others without a key"] = str(error)
with serving(sys.argv[1], server={"api_keys": KEYS}) as live:
    answers["no key"] = ask(live).status_code
    answers["a wrong key"] = ask(live, key="alice").status_code
    for name, fields in json.loads(sys.argv[2]).items():
        answers[name] = ask(live, key=ALICE, **fields).status_code
    with client_of(live, ALICE) as client:
        wrong_host = client.get("/v1/models", headers={"Host": "evil.example"})
        answers["another host"] = wrong_host.status_code
        big = client.post("/v1/completions", json={"prompt": "a" * (5 << 20)})
        answers["a big body"] = big.status_code
        answers["tokens"] = client.post("/v1/completions", json={"prompt": [10**9]}).status_code
    answers["a good request"] = ask(live, key=ALICE).status_code
    live.check_idle()
print(json.dumps(answers))
"""

IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}
WRONG = {
    "too many answers": {"n": 1000},
    "no tokens": {"max_tokens": -1},
    "more than the context": {"max_tokens": 10**6},
    "a bias without a token": {"logit_bias": {"99999999": 1}},
    "a temperature below zero": {"temperature": -1},
    "an image": {"messages": [{"role": "user", "content": [IMAGE]}]},
    "a template": {"chat_template": "{{ 7 * 7 }}"},
    "a removed constraint": {"guided_json": {}},
    "stops": {"stop": ["a"] * 100},
}


def test_the_same_is_refused_without_asserts(tiny: Tiny) -> None:
    ended = subprocess.run(
        [sys.executable, "-O", "-c", SCRIPT, str(tiny.folder), json.dumps(WRONG)],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    answers = json.loads(ended.stdout.splitlines()[-1])
    assert "key" in answers.pop("open to others without a key")
    expected = {"no key": 401, "a wrong key": 401, "another host": 421, "a big body": 413,
                "tokens": 400, "a good request": 200} | dict.fromkeys(WRONG, 400)  # fmt: skip
    assert answers == expected
