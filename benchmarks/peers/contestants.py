"""Who takes part: each tool plain, and with the speculation that served it best.

A contestant is written `peer:mode[:draft][@dtype]`, such as `llama.cpp:ngram-simple:8@bfloat16`.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch

__all__ = ["DEFAULTS", "PEERS", "Contestant", "PeerKind", "choose", "parse"]


@dataclass(frozen=True, slots=True)
class PeerKind:
    """What is to be known of a tool before it is started."""

    worker: str  # script beside this file
    modes: tuple[str, ...]  # plain first, then its ways to speculate without a trained drafter
    draft: int | None  # draft tokens where a contestant says nothing; None: the tool's own choice
    ngram: int  # longest run of tokens that is looked up
    batches: bool  # takes part in load
    # float32 and bfloat16 on processors without bfloat16 instructions, and with them
    auto_dtypes: tuple[str, str] = ("float32", "bfloat16")


PEERS = {
    "forerun": PeerKind("worker_forerun.py", ("plain", "ngram"), None, 4, True),
    "transformers": PeerKind("worker_transformers.py", ("plain", "lookup"), 8, 3, False),
    "llama.cpp": PeerKind(
        "worker_llama.py",
        ("plain", "ngram-simple", "ngram-map-k", "ngram-mod", "ngram-cache"),
        8, 3, True, ("bfloat16", "bfloat16"),
    ),
    "openvino": PeerKind("worker_openvino.py", ("plain", "lookup"), 5, 3, True),
    "vllm": PeerKind("worker_vllm.py", ("plain", "ngram"), 5, 4, True),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Contestant:
    """One tool in one mode."""

    peer: str
    mode: str
    draft: int | None = None  # None: as the peer does
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.peer not in PEERS:
            raise ValueError(f"{self.peer!r} is not one of {', '.join(PEERS)}")
        if self.mode not in self.kind.modes:
            modes = ", ".join(self.kind.modes)
            raise ValueError(f"{self.peer} has no mode {self.mode!r}; it has {modes}")
        if self.dtype not in ("auto", "bfloat16", "float32"):
            raise ValueError(f"dtype {self.dtype!r} is not one of auto, bfloat16, float32")

    def __str__(self) -> str:
        draft = "" if self.draft is None else f":{self.draft}"
        dtype = "" if self.dtype == "auto" else f"@{self.dtype}"
        return f"{self.peer}:{self.mode}{draft}{dtype}"

    @property
    def kind(self) -> PeerKind:
        return PEERS[self.peer]

    @property
    def plain(self) -> Contestant:
        """The same tool and format without speculation."""
        return Contestant(self.peer, "plain", None, self.dtype)

    def computed_dtype(self, has_fast_bf16: bool) -> str:
        """Decide what `auto` is on a processor with bfloat16 instructions, or without."""
        return self.kind.auto_dtypes[has_fast_bf16] if self.dtype == "auto" else self.dtype


DEFAULTS = tuple(Contestant(name, mode) for name, kind in PEERS.items() for mode in kind.modes[:2])


def parse(text: str) -> Contestant:
    """Read `peer:mode[:draft][@dtype]`."""
    rest, _, dtype = text.partition("@")
    peer, _, rest = rest.partition(":")
    mode, _, draft = rest.partition(":")
    return Contestant(peer, mode or "plain", int(draft) if draft else None, dtype or "auto")


def choose(
    dtypes: list[str], only: list[str], skip: list[str], also: list[str], load: bool
) -> list[Contestant]:
    """List contestants: the defaults in each format, those named by `also`, less what is cut.

    `only` and `skip` hold peers, or patterns such as `*:plain`.
    """
    formats = dtypes or ["auto"]
    named = [
        Contestant(each.peer, each.mode, None, dtype) for each in DEFAULTS for dtype in formats
    ]
    everybody = dict.fromkeys([*named, *map(parse, also)])
    return [
        each
        for each in everybody
        if (not only or _matches(each, only))
        and not _matches(each, skip)
        and (each.kind.batches or not load)
    ]


def _matches(contestant: Contestant, patterns: list[str]) -> bool:
    return any(
        pattern == contestant.peer or fnmatch(str(contestant), pattern) for pattern in patterns
    )
