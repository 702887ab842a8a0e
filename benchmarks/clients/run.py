"""Programs that people measure servers with, run against `forerun serve`.

Do they work, and what do they say?

Each has a virtual environment of its own under $FORERUN_HOME/clients, since their requirements
exclude each other. The exact command lines are printed.

python benchmarks/clients/run.py --setup          installs them (minutes, some 5 GB)
python benchmarks/clients/run.py                  runs all three against a server that it starts
python benchmarks/clients/run.py --only lm_eval
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

from forerun.home import forerun_home
from forerun.measure.provenance import provenance
from forerun.registry import resolve_model

SPECS = {
    "aiperf": ["aiperf==0.13.0"],
    "guidellm": ["guidellm==0.8.1", "torch<2.14"],
    "lm_eval": ["lm_eval[api,hf]==0.4.13", "torch<2.14"],
}
NAME = "smollm2-135m"


def home(client: str) -> Path:
    return forerun_home() / "clients" / client


def setup(clients: list[str]) -> None:
    for client in clients:
        if not (home(client) / "bin" / "python").exists():
            venv.create(home(client), with_pip=True)
        print(f"installing {client} ...", flush=True)
        python = home(client) / "bin" / "python"
        subprocess.run([str(python), "-m", "pip", "install", "-q", *SPECS[client]], check=True)


class Served:
    """`forerun serve` as a process of its own, on a free port."""

    def __enter__(self) -> str:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "forerun", "serve", "--model", NAME, "--port", "0"],
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stderr is not None
        for line in self._process.stderr:
            found = re.search(r"at (http://\S+)", line)
            if found:
                return found[1]
        raise SystemExit("the server did not start")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)


def run(command: list[str], folder: Path, **environment: str) -> str:
    print("$", " ".join(command), flush=True)
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True,
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false"} | environment,
    )  # fmt: skip
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-3000:])
        raise SystemExit(f"{command[0]} ended with {done.returncode}")
    return done.stdout + done.stderr


def aiperf(url: str, tokenizer: Path, folder: Path) -> dict[str, Any]:
    # Not HF_HUB_OFFLINE: with it aiperf takes a folder for a name in Hugging Face's cache.
    run(
        [
            str(home("aiperf") / "bin" / "aiperf"), "profile",
            "-m", NAME, "--tokenizer", str(tokenizer), "--endpoint-type", "chat",
            "--url", url, "--streaming",
            "--synthetic-input-tokens-mean", "128", "--synthetic-input-tokens-stddev", "0",
            "--output-tokens-mean", "64", "--output-tokens-stddev", "0",
            "--request-count", "16", "--concurrency", "4", "--random-seed", "123",
            "--ui", "none",
        ],
        folder,
    )  # fmt: skip
    (found,) = folder.rglob("profile_export_aiperf.json")
    told = json.loads(found.read_text())
    wanted = (
        "time_to_first_token", "inter_token_latency", "output_token_throughput", "request_count",
        "error_request_count",
    )  # fmt: skip
    picked = {name: told[name].get("avg") for name in wanted if told.get(name)}
    picked["speculative"] = sorted(name for name in told if "spec" in name or "accept" in name)
    return picked


def guidellm(url: str, tokenizer: Path, folder: Path) -> dict[str, Any]:
    run(
        [
            str(home("guidellm") / "bin" / "guidellm"), "run",
            "--backend", f"kind=openai_http,target={url},model={NAME}",
            "--profile", "kind=concurrent,streams=4",
            "--data", "kind=synthetic_text,prompt_tokens=128,output_tokens=64",
            "--tokenizer", f"kind=huggingface_auto,model={tokenizer}",
            "--constraint", "kind=max_duration,seconds=30",
            "--seed", "kind=static,value=42",
            "--output", "kind=json,path=out.json",
        ],
        folder,
        HF_HUB_OFFLINE="1",
    )  # fmt: skip
    told = json.loads((folder / "out.json").read_text())
    (benchmark,) = told["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    picked: dict[str, Any] = {"requests": totals}
    for name in ("time_to_first_token_ms", "inter_token_latency_ms", "output_tokens_per_second"):
        part = benchmark["metrics"].get(name, {}).get("successful")
        if part:
            picked[name] = {"mean": part.get("mean"), "median": part.get("median")}
    return picked


TASK = """\
task: capitals
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: What is the capital of {{{{country}}}}?\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
"""
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Germany": "Berlin", "Spain": "Madrid",
    "Egypt": "Cairo", "Russia": "Moscow", "China": "Beijing", "Greece": "Athens", "Cuba": "Havana",
}  # fmt: skip


def lm_eval(url: str, tokenizer: Path, folder: Path) -> dict[str, Any]:
    """Accuracy over ten questions of our own: through the server, and by transformers itself."""
    names = list(CAPITALS.values())
    rows = [
        {
            "country": country,
            "choices": [capital, *[names[(index + step) % 10] for step in (1, 2, 3)]],
            "answer": 0,
        }
        for index, (country, capital) in enumerate(CAPITALS.items())
    ]
    data = folder / "capitals.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "capitals.yaml").write_text(TASK.format(data=data))
    program = str(home("lm_eval") / "bin" / "lm_eval")
    common = ["--tasks", "capitals", "--include_path", str(folder), "--log_samples"]
    run(
        [
            program, "--model", "local-completions", "--model_args",
            f"model={NAME},base_url={url}/v1/completions,tokenizer={tokenizer},"
            "tokenizer_backend=huggingface,tokenized_requests=True,num_concurrent=1,"
            "max_retries=3,max_length=2048",
            *common, "--output_path", "served",
        ],
        folder,
        HF_HUB_OFFLINE="1",
    )  # fmt: skip
    run(
        [
            program, "--model", "hf", "--model_args", f"pretrained={tokenizer},dtype=float32",
            "--device", "cpu", "--batch_size", "1", *common, "--output_path", "own",
        ],
        folder,
        HF_HUB_OFFLINE="1",
    )  # fmt: skip

    def read(name: str) -> tuple[float, list[list[float]]]:
        (result,) = (folder / name).rglob("results_*.json")
        accuracy = json.loads(result.read_text())["results"]["capitals"]["acc,none"]
        (samples,) = (folder / name).rglob("samples_*.jsonl")
        lines = [json.loads(line) for line in samples.read_text().splitlines()]
        return accuracy, [[float(pair[0][0]) for pair in line["resps"]] for line in lines]

    served, own = read("served"), read("own")
    differences = [
        abs(a - b)
        for ours, theirs in zip(served[1], own[1], strict=True)
        for a, b in zip(ours, theirs, strict=True)
    ]
    return {
        "accuracy_served": served[0],
        "accuracy_transformers": own[0],
        "loglikelihoods": len(differences),
        "largest_difference": max(differences),
    }


CLIENTS = {"aiperf": aiperf, "guidellm": guidellm, "lm_eval": lm_eval}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--setup", action="store_true", help="install what is missing, and end")
    parser.add_argument("--only", nargs="+", choices=list(CLIENTS), default=list(CLIENTS))
    args = parser.parse_args()
    if args.setup:
        setup(args.only)
        return
    missing = [name for name in args.only if not (home(name) / "bin" / "python").exists()]
    if missing:
        raise SystemExit(f"{', '.join(missing)} not installed; run with --setup first")
    tokenizer = Path(resolve_model(NAME))
    found: dict[str, Any] = {}
    with Served() as url:
        for name in args.only:
            with tempfile.TemporaryDirectory() as folder:
                found[name] = CLIENTS[name](url, tokenizer, Path(folder))
            print(json.dumps({name: found[name]}, indent=1))
    print(json.dumps({**found, "provenance": provenance()}))


if __name__ == "__main__":
    main()
