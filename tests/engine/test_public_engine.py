"""The engine as its users see it: order, streams, asyncio, threads, cancellation, closing."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from reference.drafters import Fake, Oracle, RightThenWrong

from forerun import Engine, SamplingParams, SpeculationConfig
from forerun.errors import EngineClosed
from forerun.types import FinishReason

GREEDY = SamplingParams(temperature=0, max_tokens=24)
ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
OPTIONS = {"device": "cpu", "dtype": "float32", "num_threads": 1}
WAIT_S = 30


def make(tiny, drafter="none", **options):
    return Engine.from_pretrained(str(tiny.folder), drafter=drafter, **(OPTIONS | options))


@pytest.fixture(scope="module")
def engine(tiny):
    with make(tiny, "ngram", max_num_seqs=4) as engine:
        yield engine


def scheduler(engine):
    return engine.machinery.scheduler


def wait_idle(engine):
    """Wait until the engine's thread has carried out what was posted and holds nothing."""
    end_s = time.monotonic() + WAIT_S
    while scheduler(engine).unfinished() or engine._loop._sinks:
        assert time.monotonic() < end_s, "the engine still holds requests"
        time.sleep(0.005)
    pool = scheduler(engine)._pool
    assert pool.num_free == pool.num_blocks
    engine._loop._core.check_integrity()


def assert_cancelled(engine, requests):
    """They ended because somebody ended them, not by themselves."""
    assert requests, "nothing was running"
    wait_idle(engine)
    assert {request.finish_reason for request in requests} == {FinishReason.CANCELLED}


def assert_plain(tiny, result, params=GREEDY):
    want = tiny.plain(result.prompt_token_ids, params)
    assert result.token_ids == want.token_ids
    assert result.text == want.text
    assert result.finish_reason == want.finish_reason
    assert result.error is None


def test_results_come_in_the_order_of_the_prompts(engine, tiny, prompts):
    params = [
        SamplingParams(temperature=0, max_tokens=count) for count in (30, 1, 7, 2, 20, 3, 9, 4)
    ]
    results = engine.generate(prompts, params)
    for result, prompt, own in zip(results, prompts, params, strict=True):
        assert result.prompt_token_ids == tuple(prompt)
        assert_plain(tiny, result, own)
    wait_idle(engine)


def test_prompts_of_every_form(engine, tiny):
    text = "the quick brown fox"
    ids = tiny.codec.encode(text)
    messages = [{"role": "user", "content": "hello"}]
    chat = tiny.codec.encode("<|start|>user\nhello<|end|><|start|>assistant\n")
    single = {
        "text": engine.generate(text, GREEDY),
        "ids": engine.generate(ids, GREEDY),
        "chat": engine.generate(messages, GREEDY),
    }
    assert all(len(results) == 1 for results in single.values())
    assert single["text"][0].token_ids == single["ids"][0].token_ids
    assert single["chat"][0].prompt_token_ids == tuple(chat)
    mixed = engine.generate([text, ids, messages], GREEDY)
    assert [r.token_ids for r in mixed] == [r[0].token_ids for r in single.values()]
    assert engine.generate([], GREEDY) == []


def test_a_stream_is_the_answer_in_pieces(engine, tiny, prompts):
    for prompt in prompts:
        chunks = list(engine.stream(prompt, GREEDY))
        assert all(chunk.result is None for chunk in chunks[:-1])
        result = chunks[-1].result
        assert "".join(chunk.text for chunk in chunks) == result.text
        assert tuple(t for chunk in chunks for t in chunk.token_ids) == result.token_ids
        assert sum(chunk.num_accepted for chunk in chunks) == result.stats.num_accepted
        assert_plain(tiny, result)


def test_closing_a_stream_frees_its_request(engine, prompts):
    stream = engine.stream(prompts[0], ENDLESS)
    first = next(stream)
    assert first.token_ids
    running = scheduler(engine).unfinished()
    stream.close()
    assert_cancelled(engine, running)


def test_dropping_a_stream_frees_its_request(engine, prompts):
    for chunk in engine.stream(prompts[0], ENDLESS):
        assert chunk.token_ids
        running = scheduler(engine).unfinished()
        break
    gc.collect()
    assert_cancelled(engine, running)


def test_a_stream_that_is_never_read_starts_nothing(engine, prompts):
    engine.stream(prompts[0], ENDLESS)
    wait_idle(engine)


def test_asyncio_generates_the_same(engine, tiny, prompts):
    async def main():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        results = await engine.agenerate(prompts, GREEDY)
        ticking.cancel()
        assert ticks > 10, "the event loop stood still"
        return results

    results = asyncio.run(main())
    assert [r.prompt_token_ids for r in results] == [tuple(prompt) for prompt in prompts]
    for result in results:
        assert_plain(tiny, result)


def test_asyncio_streams_the_same(engine, tiny, prompts):
    async def read(prompt):
        chunks = [chunk async for chunk in engine.astream(prompt, GREEDY)]
        assert "".join(chunk.text for chunk in chunks) == chunks[-1].result.text
        return chunks[-1].result

    async def main():
        return await asyncio.gather(*map(read, prompts))

    for result in asyncio.run(main()):
        assert_plain(tiny, result)


def test_cancelling_an_asyncio_task_frees_its_requests(engine, prompts):
    async def main():
        task = asyncio.create_task(engine.agenerate(prompts, ENDLESS))
        while len(engine._loop._sinks) < len(prompts):
            await asyncio.sleep(0.001)
        running = scheduler(engine).unfinished()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return running

    assert_cancelled(engine, asyncio.run(main()))


def test_closing_an_asyncio_stream_frees_its_request(engine, prompts):
    async def main():
        stream = engine.astream(prompts[0], ENDLESS)
        async for chunk in stream:
            assert chunk.token_ids
            running = scheduler(engine).unfinished()
            break
        await stream.aclose()
        return running

    assert_cancelled(engine, asyncio.run(main()))


def test_a_time_limit_frees_its_request(engine, prompts):
    async def main():
        answer = asyncio.create_task(engine.agenerate(prompts[0], ENDLESS))
        while not scheduler(engine).unfinished():
            await asyncio.sleep(0.001)
        running = scheduler(engine).unfinished()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(answer, 0.01)
        return running

    assert_cancelled(engine, asyncio.run(main()))


def test_an_event_loop_that_goes_away(engine, tiny, prompts):
    """A loop closed with a request in flight leaves the engine alive for others."""
    loop = asyncio.new_event_loop()

    async def main():
        stream = engine.astream(prompts[0], ENDLESS)
        await anext(stream)
        return stream

    stream = loop.run_until_complete(main())
    loop.close()
    (result,) = engine.generate(prompts[1], GREEDY)
    assert_plain(tiny, result)
    with pytest.raises(StopIteration):
        stream.aclose().send(None)
    wait_idle(engine)


def test_several_threads_at_once(engine, tiny, prompts):
    def work(index):
        prompt = prompts[index % len(prompts)]
        if index % 3 == 0:
            return list(engine.stream(prompt, GREEDY))[-1].result
        return engine.generate(prompt, GREEDY)[0]

    with ThreadPoolExecutor(8) as threads:
        for result in threads.map(work, range(32)):
            assert_plain(tiny, result)
    wait_idle(engine)


def test_a_seed_that_was_drawn_is_told(engine, prompts):
    params = SamplingParams(max_tokens=12)
    first, second = engine.generate([prompts[0]] * 2, params)
    assert first.seed != second.seed
    (again,) = engine.generate(prompts[0], SamplingParams(max_tokens=12, seed=first.seed))
    assert again.token_ids == first.token_ids


def test_a_drafter_object(tiny, prompts):
    drafter = RightThenWrong(tiny.answers(prompts, GREEDY), tiny.vocab_size)
    with make(tiny, drafter, max_draft=6) as engine:
        results = engine.generate(prompts, GREEDY)
    for result in results:
        assert_plain(tiny, result)
        assert result.stats.num_accepted > 0
        assert len(result.stats.offered_by_position) == 6


def test_a_drafter_by_name(tiny, repeating, prompts):
    for name, drafts in (("none", False), ("ngram", True), ("suffix", True), ("auto", True)):
        with make(repeating, name) as engine:
            results = engine.generate(prompts, GREEDY)
        assert any(result.stats.num_drafted for result in results) == drafts
        for result in results:
            assert_plain(repeating, result)
    with make(repeating, "ngram", max_draft=0) as engine:
        assert not any(r.stats.num_drafted for r in engine.generate(prompts, GREEDY))


def test_what_is_asked_for_in_two_places_is_not_dropped_in_silence(tiny):
    """`drafter` and `max_draft` beside a whole SpeculationConfig: obeyed, or refused."""
    both = {"drafter": "none", "max_draft": 3, "speculation": SpeculationConfig(drafter="ngram")}
    try:
        engine = Engine.from_pretrained(str(tiny.folder), **both, **OPTIONS)
    except ValueError:
        return
    with engine:
        assert engine.config.speculation.drafter == "none"
        assert engine.config.speculation.max_draft == 3


class Slow(Fake):
    """Take a while for each step, so that requests are certainly running."""

    def __init__(self):
        self.stepping = threading.Event()

    def observe(self, outcomes, features):
        self.stepping.set()
        time.sleep(0.002)


def test_closing_ends_running_and_waiting_requests(tiny, prompts):
    drafter = Slow()
    engine = make(tiny, drafter, max_num_seqs=2)
    with ThreadPoolExecutor(1) as threads:
        pending = threads.submit(engine.generate, prompts[:5], ENDLESS)
        assert drafter.stepping.wait(WAIT_S)
        engine.close()
        results = pending.result(WAIT_S)
    assert len(results) == 5
    for result in results:
        assert result.finish_reason == FinishReason.ERROR
        assert isinstance(result.error, EngineClosed)
    engine.close()  # again: nothing to do
    with pytest.raises(EngineClosed):
        engine.generate(prompts[0], GREEDY)
    with pytest.raises(EngineClosed):
        next(engine.stream(prompts[0], GREEDY))
    with pytest.raises(EngineClosed):
        asyncio.run(engine.agenerate(prompts[0], GREEDY))


def test_closing_ends_a_stream(tiny, prompts):
    engine = make(tiny, Slow())
    stream = engine.stream(prompts[0], ENDLESS)
    next(stream)
    engine.close()
    last = list(stream)[-1]
    assert isinstance(last.result.error, EngineClosed)


@pytest.mark.parametrize("closes_first", [False, True])
def test_submitting_while_the_engine_closes_never_hangs(tiny, prompts, closes_first):
    """Whoever comes to the door first: the request is answered, or hears that all is over."""
    engine = make(tiny)
    answers = []

    def ask():
        try:
            answers.append(engine.generate(prompts[0], GREEDY)[0].error)
        except EngineClosed as error:
            answers.append(error)

    both = [threading.Thread(target=ask, daemon=True), threading.Thread(target=engine.close)]
    with engine._loop._door:
        for thread in reversed(both) if closes_first else both:
            thread.start()
            time.sleep(0.05)  # it stands at the door
    for thread in both:
        thread.join(WAIT_S)
    assert len(answers) == 1, "generate() waits for ever"
    assert answers[0] is None or isinstance(answers[0], EngineClosed)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [RuntimeError("bug"), SystemExit(1)], ids=["error", "exit"])
def test_an_engine_that_dies_tells_everybody(tiny, prompts, error, caplog):
    """A bug outside all guards, or a library that calls sys.exit: an error, not a hang."""
    engine = make(tiny)
    asked, answers = threading.Event(), []

    def die(now_s):
        asked.wait(WAIT_S)
        raise error

    engine.machinery.scheduler.schedule = die

    def ask():
        answers.append(engine.generate(prompts[:2], GREEDY))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asked.set()
    asking.join(5)
    assert answers, "generate() waits for ever"
    assert all(isinstance(result.error, EngineClosed) for result in answers[0])
    with pytest.raises(EngineClosed):
        engine.generate(prompts[0], GREEDY)


def test_a_drafter_that_knows_everything_through_the_public_engine(tiny, prompts):
    with make(tiny, Oracle(tiny.answers(prompts, GREEDY), tiny.vocab_size)) as engine:
        results = engine.generate(prompts, GREEDY)
    for result in results:
        assert_plain(tiny, result)
        assert result.stats.num_accepted == result.stats.num_drafted > 0
        assert result.stats.num_steps == 2
