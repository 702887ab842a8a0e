"""Slow twin of a request's options: one row, one token, plain Python floats; whole texts anew.

Shares no code with the package but the noise, which is a definition, and a codec to encode with.
`Answer.closeness` says how near any decision was to going the other way, so that a test can leave
out what float32 and float64 may rightly decide differently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from reference.filters_slow import SlowRow, filtered_row
from reference.plain import PlainLlama, first_stop

from forerun.params import SamplingParams
from forerun.sampling import Stream, uniforms
from forerun.text import TextCodec

DEAD = -math.inf


class NothingLeftError(Exception):
    """The options leave no token; `option` is the one that took the last."""

    def __init__(self, option: str) -> None:
        super().__init__(option)
        self.option = option


@dataclass
class Answer:
    """What plain decoding with options gives, and the rows that it came from."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    dead_by: str | None = None  # the option that left nothing, where finish_reason is "error"
    raw_rows: list[list[float]] = field(default_factory=list)  # log-probabilities [V] each
    processed_rows: list[list[float]] = field(default_factory=list)
    closeness: float = 1.0

    def rows(self, mode: str) -> list[list[float]]:
        return {"raw": self.raw_rows, "processed": self.processed_rows}[mode]


def encode_bad_words(codec: TextCodec, words: Sequence[str]) -> list[list[int]]:
    """Encode each word alone and after a space, without special tokens."""
    return [codec.encode(f + word, add_special=False) for word in words for f in ("", " ")]


def adjusted_row(
    row: Sequence[float],
    prompt: Sequence[int],
    output: Sequence[int],
    options: SamplingParams,
    eos: Sequence[int],
    bad_words: Sequence[Sequence[int]],
) -> list[float]:
    """Ban, bias and penalise one row of logits; raise where nothing is left."""
    logits = [float(logit) for logit in row]
    tokens = [*prompt, *output]

    def ban(option: str, banned: Sequence[int]) -> None:
        for token in banned:
            logits[token] = DEAD
        if all(logit == DEAD for logit in logits):
            raise NothingLeftError(option)

    if options.allowed_token_ids is not None:
        allowed = set(options.allowed_token_ids)
        ban("allowed_token_ids", [i for i in range(len(logits)) if i not in allowed])
    ban("banned_token_ids", options.banned_token_ids)
    completed = []
    for word in bad_words:
        before = list(word[:-1])
        if not before or tokens[-len(before) :] == before:
            completed.append(word[-1])
    ban("bad_words", completed)
    if len(output) < options.min_tokens:
        ban("min_tokens", [*options.stop_token_ids, *(() if options.ignore_eos else eos)])

    for token, bias in dict(options.logit_bias).items():
        logits[token] += bias
    for token in set(tokens):
        if logits[token] > 0:
            logits[token] /= options.repetition_penalty
        else:
            logits[token] *= options.repetition_penalty
    for token in set(output):
        logits[token] -= options.frequency_penalty * output.count(token)
        logits[token] -= options.presence_penalty
    return logits


def filtered_with_options(
    row: Sequence[float],
    prompt: Sequence[int],
    output: Sequence[int],
    options: SamplingParams,
    eos: Sequence[int],
    bad_words: Sequence[Sequence[int]],
) -> SlowRow:
    """Adjust and filter one row; the margin covers the greedy choice too."""
    logits = adjusted_row(row, prompt, output, options, eos, bad_words)
    found = filtered_row(
        logits, options.temperature, options.top_k, options.top_p, options.min_p
    )  # fmt: skip
    if options.temperature == 0:
        first, second = sorted(logits, reverse=True)[:2]
        return SlowRow(found.probs, min(1.0, first - second))
    return found


def next_probs_with_options(
    row: Sequence[float],
    prompt: Sequence[int],
    output: Sequence[int],
    options: SamplingParams,
    eos: Sequence[int],
    bad_words: Sequence[Sequence[int]],
) -> list[float]:
    """Compute the distribution that the next token is drawn from."""
    return filtered_with_options(row, prompt, output, options, eos, bad_words).probs


def draw(probs: Sequence[float], seed: int, position: int) -> tuple[int, float]:
    """Draw the token at `position` by inverse CDF: the token, and how near a border it was."""
    where = np.array([position], np.int64)
    point = float(uniforms(np.array([seed], np.uint64), where, Stream.TARGET)[0])
    running = 0.0
    for token, p in enumerate(probs):
        before, running = running, running + p
        if point < running:
            return token, min(running - point, point - before if before > 0 else 1.0)
    return max(token for token, p in enumerate(probs) if p > 0), 0.0


def log_softmax(row: Sequence[float]) -> list[float]:
    top = max(row)
    total = math.log(math.fsum(math.exp(logit - top) for logit in row))
    return [logit - top - total for logit in row]


def log_probs(probs: Sequence[float]) -> list[float]:
    return [math.log(p) if p > 0 else DEAD for p in probs]


def searched_text(codec: TextCodec, output: Sequence[int], min_tokens: int) -> tuple[str, str]:
    """Cut the text into what stop strings are not searched in and the rest."""
    whole, head = codec.decode(output), codec.decode(output[:min_tokens])
    same = 0
    while same < min(len(whole), len(head)) and whole[same] == head[same]:
        same += 1
    return whole[:same], whole[same:]


def generate_with_options(
    model: PlainLlama,
    codec: TextCodec,
    prompt: Sequence[int],
    options: SamplingParams,
    *,
    seed: int | None = None,
    eos: Sequence[int] | None = None,
    max_model_len: int = 1 << 30,
) -> Answer:
    """Continue a prompt, one full evaluation a token."""
    eos = model.config["eos_token_id"] if eos is None else eos
    seed = options.seed if seed is None else seed
    bad_words = encode_bad_words(codec, options.bad_word_strings)
    stop_ids = {*options.stop_token_ids, *(() if options.ignore_eos else eos)}
    answer = Answer()
    output = answer.token_ids

    def end(reason: str, text: str) -> Answer:
        answer.finish_reason, answer.text = reason, text
        return answer

    while len(output) != options.max_tokens and len(prompt) + len(output) < max_model_len:
        row = model.next_logits([*prompt, *output])
        try:
            found = filtered_with_options(row, prompt, output, options, eos, bad_words)
        except NothingLeftError as caught:
            answer.dead_by = caught.option
            return end("error", codec.decode(output))
        if options.temperature == 0:
            token, near = found.probs.index(1.0), 1.0
        else:
            assert seed is not None, "the twin needs a seed"
            token, near = draw(found.probs, seed, len(prompt) + len(output))
        answer.closeness = min(answer.closeness, found.margin, near)
        output.append(token)
        answer.raw_rows.append(log_softmax(row))
        answer.processed_rows.append(log_probs(found.probs))
        if token in stop_ids:
            return end("stop", codec.decode(output[:-1]))
        head, rest = searched_text(codec, output, options.min_tokens)
        cut = first_stop(rest, options.stop_strings)
        if cut is not None:
            return end("stop", head + cut)
    return end("length", codec.decode(output))


def prompt_rows(model: PlainLlama, prompt: Sequence[int]) -> list[list[float]]:
    """Compute the log-probabilities [V] at each place of a prompt from the second on."""
    return [log_softmax(row) for row in model.logits(tuple(prompt))[:-1].tolist()]
