"""The dashboard in a real browser against a fake server: what it shows, and what it must not do."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from dashboard_browser import Open, Page
from dashboard_fake import MAX_DRAFT, PAGE_DIR, Fake, Script

pytestmark = pytest.mark.slow  # minutes; `make test-slow`

EVIL = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
MODULES = "const load = (name) => import(new URL(`dashboard/${name}.js`, location.href));"


def ask(page: Page, text: str = "hello") -> None:
    page.run("document.querySelector('#prompt').focus()")
    page.type(text)
    page.key("Enter")


def answered(page: Page, count: int = 1) -> None:
    page.wait(f"document.querySelectorAll('.answer[aria-busy=false]').length === {count}")


def marks(page: Page) -> list[list[Any]]:
    """[text, number of tokens, class] of each accepted run."""
    return page.run(
        "[...document.querySelectorAll('.answer mark')]"
        ".map((m) => [m.textContent, +m.dataset.tokens, m.className])"
    )


def module(page: Page, body: str) -> Any:
    """Runs the body of an async function that may `load` the page's modules."""
    return page.run(f"(async () => {{ {MODULES} {body} }})()")


class TestPage:
    def test_loads_under_its_policy_and_stays_at_home(self, open_page: Open, fake: Fake) -> None:
        page = open_page()
        ask(page)
        answered(page)
        assert page.complaints == []
        assert {
            address.split("?")[0] for address in page.addresses if not address.startswith(fake.url)
        } == set()

    def test_header_names_what_is_served(self, open_page: Open) -> None:
        page = open_page()
        assert page.text("#model") == "smollm2-135m"
        assert page.text("#drafter") == f"ngram, up to {MAX_DRAFT}"
        assert page.text("#machine") == "AMD EPYC, 2 threads, float32"
        assert page.text("#status") == "ready"

    def test_no_inline_code_or_styles_in_the_files(self) -> None:
        html = (PAGE_DIR / "index.html").read_text()
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", html)
        for path in PAGE_DIR.glob("*"):
            text = path.read_text()
            assert not re.search(r"https?://(?!www\.w3\.org)", text), path.name
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text
            ), path.name

    @pytest.mark.parametrize("level", ["warn", "bad"])
    def test_health_shows_what_is_wrong_and_only_that(
        self, open_page: Open, script: Script, level: str
    ) -> None:
        script.health = [
            {"level": "ok", "text": "fine"},
            {"level": level, "text": "acceptance collapsed"},
        ]
        page = open_page()
        assert page.run(
            "[...document.querySelectorAll('#health li')].map(li => li.dataset.level)"
        ) == [level]
        assert "acceptance collapsed" in page.text("#health")

    def test_says_that_speculation_is_off_and_why(self, open_page: Open, script: Script) -> None:
        script.enabled = False
        page = open_page()
        assert "drafter failed to load" in page.text("#health")
        assert "drafter failed to load" in page.text("#verdict")
        assert page.run("document.getElementById('speculate').disabled")
        ask(page)
        answered(page)
        assert script.asked[0]["speculative"]["enabled"] is False


class TestChat:
    def test_marks_accepted_pieces_and_nothing_else(self, open_page: Open, script: Script) -> None:
        script.steps = [([], ["The"]), ([" cat", " sat"], [" down"]), ([], ["."]), ([" Then"], [])]
        page = open_page()
        ask(page)
        answered(page)
        assert marks(page) == [[" cat sat", 2, "look-0"], [" Then", 1, "look-0"]]
        assert page.text(".answer .text") == "The cat sat down. Then"

    def test_marks_newlines_emoji_and_html_as_text(self, open_page: Open, script: Script) -> None:
        script.steps = [
            (["a\n", "\n", " 👩‍🚀"], ["é"]),
            ([EVIL, "&lt;"], ["</div>"]),
            ([" \u2028x"], ["\r\n"]),
        ]
        page = open_page()
        ask(page)
        answered(page)
        assert [mark[:2] for mark in marks(page)] == [
            ["a\n\n 👩‍🚀", 3],
            [EVIL + "&lt;", 2],
            [" \u2028x", 1],
        ]
        assert page.text(".answer .text") == f"a\n\n 👩‍🚀é{EVIL}&lt;</div> \u2028x\r\n"
        assert page.run(
            "window.hacked === undefined"
            " && document.querySelectorAll('#log img, #log script').length === 0"
        )
        assert page.complaints == []

    def test_pieces_that_do_not_join_to_the_text_are_not_believed(self, open_page: Open) -> None:
        page = open_page()
        shown = module(page, """
            const { Answer } = await load("answer");
            const answer = new Answer("x");
            answer.add("abc", { num_accepted: 1, drafter: "ngram", pieces: ["a", "b"] });
            answer.add("de", { num_accepted: 9, drafter: "ngram", pieces: ["d", "e"] });
            answer.add("f", undefined);
            answer.finish();
            const marks = [...answer.body.querySelectorAll("mark")].map((m) => m.textContent);
            return [answer.body.textContent, marks];
        """)  # fmt: skip
        assert shown == ["abcdef", ["de"]]

    def test_each_drafter_has_a_colour_and_a_line_style_of_its_own(
        self, open_page: Open, script: Script
    ) -> None:
        script.drafters = ["ngram", "suffix", "draft_model", "none"]
        page = open_page()
        looks = page.run("""[...document.querySelectorAll('#legend mark')].map((mark) => {
            const style = getComputedStyle(mark);
            return [mark.textContent, style.textDecorationColor, style.textDecorationStyle];
        })""")
        assert [name for name, _, _ in looks] == ["ngram", "suffix", "draft_model"]
        assert len({colour for _, colour, _ in looks}) == len({line for _, _, line in looks}) == 3

    def test_sends_what_the_settings_say(self, open_page: Open, script: Script) -> None:
        page = open_page()
        for field, value in {"temperature": 0.7, "max-tokens": 33, "max-draft": 5}.items():
            page.run(f"document.getElementById('{field}').value = {value}")
        ask(page)
        answered(page)
        body = script.asked[0]
        assert (body["model"], body["temperature"], body["max_tokens"], body["stream"]) == (
            "smollm2-135m",
            0.7,
            33,
            True,
        )
        assert body["stream_options"] == {"include_usage": True}
        assert body["speculative"] == {
            "enabled": True,
            "drafter": "ngram",
            "max_draft": 5,
            "mark": True,
        }

    def test_answer_line_has_the_numbers(self, open_page: Open) -> None:
        page = open_page()
        ask(page)
        answered(page)
        line = page.text(".answer .figures")
        for part in (
            "91.4 tokens/s",
            "mean acceptance length3.56",
            "acceptance rate50 %",
            "23 of 32",
            "41.5 ms",
        ):
            assert part in line

    def test_conversation_is_sent_along_and_can_be_cleared(
        self, open_page: Open, script: Script
    ) -> None:
        script.steps = [([], ["one"])]
        page = open_page()
        ask(page, "first")
        answered(page)
        ask(page, "second")
        answered(page, 2)
        assert [m["content"] for m in script.asked[1]["messages"]] == ["first", "one", "second"]
        page.run("document.getElementById('clear').click()")
        ask(page, "third")
        answered(page)
        assert [m["content"] for m in script.asked[2]["messages"]] == ["third"]

    def test_again_without_drafts_compares(self, open_page: Open, script: Script) -> None:
        page = open_page()
        ask(page)
        answered(page)
        page.run("document.querySelector('.answer-tools button').click()")
        page.wait("document.querySelectorAll('.answer')[1]?.textContent.includes('The same text')")
        assert "2.35 ×" in page.run("document.querySelectorAll('.answer')[1].textContent")  # noqa: RUF001
        assert script.asked[1]["speculative"]["enabled"] is False
        assert script.asked[1]["messages"] == script.asked[0]["messages"]

    def test_stop_aborts_the_request_and_keeps_the_text(
        self, open_page: Open, script: Script
    ) -> None:
        script.endless, script.step_s = True, 0.02
        page = open_page()
        ask(page)
        page.wait("document.querySelectorAll('.answer mark').length > 3")
        assert page.run("document.querySelector('#send').disabled")
        page.run("document.querySelector('#stop').click()")
        answered(page)
        assert script.aborted.wait(10)
        assert page.text(".answer-note") == "Stopped."
        assert page.run(
            "!document.querySelector('#send').disabled && document.querySelector('#stop').disabled"
        )
        assert page.complaints == []

    def test_whoever_scrolled_up_is_left_there(self, open_page: Open, script: Script) -> None:
        script.steps = [([], ["line\n" * 60])]
        page = open_page()
        ask(page)
        answered(page)
        end = "(({scrollTop, scrollHeight, clientHeight: h}) => scrollHeight - scrollTop - h)(log)"
        assert page.run(end) < 40  # followed to its end
        script.step_s = 0.5
        ask(page)
        page.wait("document.querySelectorAll('.answer')[1]?.textContent.includes('line')")
        page.run("log.scrollTop = 0")
        answered(page, 2)
        assert page.run("log.scrollTop") == 0

    def test_http_error_is_told_and_the_prompt_comes_back(
        self, open_page: Open, script: Script
    ) -> None:
        script.error = f"This model's maximum context length is 8192 tokens. {EVIL}"
        page = open_page()
        ask(page, "much")
        answered(page)
        assert page.text(".answer-note") == script.error
        assert page.run("document.querySelector('#prompt').value") == "much"

    def test_error_inside_the_stream_is_told(self, open_page: Open, script: Script) -> None:
        script.broken_off = "the server is shutting down"
        page = open_page()
        ask(page)
        answered(page)
        assert page.text(".answer-note") == "the server is shutting down"
        assert "quick brown" in page.text(".answer .text")

    def test_nothing_can_be_sent_while_the_model_loads(
        self, open_page: Open, script: Script
    ) -> None:
        script.status = "loading"
        page = open_page()
        ask(page)
        assert page.run("document.querySelector('#send').disabled")
        script.status = "ready"
        page.wait("!document.querySelector('#send').disabled")
        assert script.asked == []


class TestUntrusted:
    def test_markup_in_every_text_of_the_server_shows_as_text(
        self, open_page: Open, script: Script
    ) -> None:
        script.model = script.drafters[0] = EVIL
        script.health = [{"level": "bad", "text": EVIL}]
        script.steps = [([EVIL], [EVIL])]
        script.state = {
            "machine": EVIL, "version": EVIL, "idle_reasons": {EVIL: 3},
            "events": [{"time_s": int(time.time()), "kind": EVIL, "text": EVIL}],
        }  # fmt: skip
        page = open_page()
        ask(page, EVIL)
        answered(page)
        page.wait("document.querySelector('#event-list button') !== null")
        page.run("document.querySelector('#event-list button').click()")
        for selector in [
            "#model", "#drafter", "#machine", "#health", "#legend", "#idle", "#event-list",
            "#uptime", ".question .text", ".answer .text", ".answer h3", ".cursor-tag",
        ]:  # fmt: skip
            assert EVIL.replace("_", " ") in page.text(selector).replace("_", " "), selector
        assert page.run(
            "window.hacked === undefined && document.querySelectorAll('img').length === 1"
        )
        assert page.complaints == []


class TestKey:
    def test_asks_for_a_key_keeps_it_for_the_tab_and_uses_it(
        self, open_page: Open, script: Script
    ) -> None:
        script.api_key = "s3cret"
        page = open_page(known=False)
        page.wait("!document.getElementById('key-form').hidden")
        assert page.run("document.activeElement.id") == "key"
        polls = len(script.since)
        time.sleep(1.5)
        assert len(script.since) == polls  # asking again without a key is pointless
        page.type("wrong")
        page.key("Enter")
        page.wait(
            "document.querySelector('#key-form label').textContent.includes('did not accept')"
        )
        page.type("s3cret")
        page.key("Enter")
        page.wait("document.getElementById('model').textContent === 'smollm2-135m'")
        assert page.run("document.getElementById('key-form').hidden")
        assert page.run("sessionStorage.getItem('forerun-api-key')") == "s3cret"
        assert page.run("localStorage.length") == 0
        ask(page)
        answered(page)
        assert "quick brown" in page.text(".answer .text")


class TestLooks:
    @pytest.mark.parametrize("view", ["chat", "charts"])
    def test_phone_has_no_sideways_scroll(self, open_page: Open, script: Script, view: str) -> None:
        script.model = "a-rather-long-model-name-" * 4
        script.steps = [(["x" * 200], ["y" * 200])]
        script.health = [{"level": "bad", "text": "z" * 200}]
        page = open_page(width=360, height=740)
        ask(page, "w" * 200)
        answered(page)
        page.run(f"document.querySelector('[data-show={view}]').click()")
        page.wait(f"getComputedStyle(document.getElementById('{view}')).display !== 'none'")
        page.run("document.getElementById('settings').open = true")
        wide = page.run("""[...document.querySelectorAll('html, body, section, #log, header')]
            .filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.id || e.tagName)""")
        assert wide == []
        assert page.run("document.documentElement.scrollWidth") == 360

    def test_dark_follows_the_system_and_the_button_overrides_it(self, open_page: Open) -> None:
        page = open_page(prefers_color_scheme="dark")
        ground = "getComputedStyle(document.body).backgroundColor"
        dark = page.run(ground)
        page.run("document.getElementById('theme').click()")
        assert page.text("#theme") == "Theme: light"
        light = page.run(ground)
        assert dark != light
        page.call("Page.reload")
        page.wait(f"document.readyState === 'complete' && {ground} === '{light}'")
        page.run("document.getElementById('theme').click()")
        page.media(prefers_color_scheme="light")
        assert page.run(ground) == dark

    def test_reduced_motion_stops_the_caret(self, open_page: Open, script: Script) -> None:
        script.endless, script.step_s = True, 0.05
        page = open_page(prefers_reduced_motion="reduce")
        ask(page)
        page.wait("document.querySelectorAll('.answer mark').length > 0")
        assert page.run("document.getAnimations().length") == 0

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_text_has_contrast(self, open_page: Open, scheme: str) -> None:
        """WCAG AA for text: 4.5 to 1, on each of the grounds it stands on."""
        page = open_page(prefers_color_scheme=scheme)
        colours = page.run("""(() => {
            const probe = document.body.appendChild(document.createElement('i'));
            const read = (name) => {
                probe.style.color = `var(--${name})`;
                return getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map(Number);
            };
            const names = ['ground', 'panel', 'sunk', 'ink', 'muted', 'good', 'warn', 'bad',
                'accent', 'on-accent'];
            return Object.fromEntries(names.map((name) => [name, read(name)]));
        })()""")

        def luminance(rgb: list[float]) -> float:
            parts = [c / 255 for c in rgb]
            linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
            return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

        def contrast(a: str, b: str) -> float:
            low, high = sorted((luminance(colours[a]), luminance(colours[b])))
            return (high + 0.05) / (low + 0.05)

        for text in ("ink", "muted", "good", "warn", "bad"):
            for ground in ("ground", "panel", "sunk"):
                assert contrast(text, ground) >= 4.5, (text, ground)
        assert contrast("on-accent", "accent") >= 4.5


class TestKeyboard:
    def test_everything_can_be_reached_and_shows_its_focus(self, open_page: Open) -> None:
        page = open_page()
        reached: list[str] = []
        for _ in range(40):
            page.key("Tab")
            name, width = page.run("""(() => {
                const e = document.activeElement;
                const style = getComputedStyle(e);
                const shown = style.outlineStyle !== 'none' || e.className === 'skip';
                return [e.id || e.dataset.window || e.textContent.trim().slice(0, 20), shown];
            })()""")
            if reached and name == reached[0]:
                break
            reached.append(name)
            assert width, f"{name}: no visible focus"
        wanted = [
            "theme",
            "clear",
            "log",
            "prompt",
            "Settings",
            "speculate",
            "send",
            "60",
            "300",
            "900",
            "pause",
            "axis",
        ]
        places = [
            next(i for i, name in enumerate(reached) if name.startswith(want)) for want in wanted
        ]
        assert places == sorted(places)

    def test_enter_sends_and_shift_enter_adds_a_line(self, open_page: Open, script: Script) -> None:
        page = open_page()
        page.run("document.querySelector('#prompt').focus()")
        page.type("a")
        page.key("Enter", shift=True)
        page.type("b")
        assert script.asked == []
        page.key("Enter")
        answered(page)
        assert script.asked[0]["messages"] == [{"role": "user", "content": "a\nb"}]
        assert page.run("document.activeElement.id") == "prompt"

    def test_stop_by_keyboard(self, open_page: Open, script: Script) -> None:
        script.endless, script.step_s = True, 0.02
        page = open_page()
        ask(page)
        page.wait("document.querySelectorAll('.answer mark').length > 0")
        for _ in range(6):
            if page.run("document.activeElement.id") == "stop":
                break
            page.key("Tab")
        page.key("Enter")
        answered(page)
        assert page.text(".answer-note") == "Stopped."

    def test_arrow_keys_move_the_time_cursor(self, open_page: Open) -> None:
        page = open_page()
        page.run("document.getElementById('axis').focus()")
        page.key("ArrowLeft")
        first = int(page.run("document.querySelector('#axis').ariaValueNow"))
        page.key("ArrowLeft", shift=True)
        second = int(page.run("document.querySelector('#axis').ariaValueNow"))
        assert first - second == 10
        assert re.search(
            r"\d\d:\d\d:\d\d.*Speed-up \d\.\d\d ×.*TPOT",  # noqa: RUF001
            page.run("document.querySelector('#axis').ariaValueText"),
        )
        assert page.run("document.querySelectorAll('line.cursor[visibility=visible]').length") == 11
        page.key("Escape")
        assert page.run("document.querySelectorAll('line.cursor[visibility=visible]').length") == 0

    def test_every_field_and_button_has_a_name(self, open_page: Open) -> None:
        page = open_page()
        tree = page.call("Accessibility.getFullAXTree")["nodes"]
        roles = {
            "button",
            "textbox",
            "checkbox",
            "switch",
            "combobox",
            "spinbutton",
            "slider",
            "image",
            "log",
            "link",
        }
        seen = set()
        for node in tree:
            role = node.get("role", {}).get("value")
            if node["ignored"] or role not in roles:
                continue
            seen.add(role)
            assert node.get("name", {}).get("value"), node
        assert {"button", "textbox", "switch", "slider", "image", "log"} <= seen

    def test_the_answer_and_the_status_are_spoken_politely(self, open_page: Open) -> None:
        page = open_page()
        assert page.run("document.getElementById('log').getAttribute('aria-live')") == "polite"
        assert page.run("document.querySelectorAll('[role=status]').length") >= 3


class TestCharts:
    def test_every_strip_draws_on_the_same_axis(self, open_page: Open) -> None:
        page = open_page()
        strips = page.run("""[...document.querySelectorAll('.strip')].map((strip) => ({
            id: strip.dataset.strip,
            left: strip.querySelector('svg.plot').getBoundingClientRect().left,
            width: +strip.querySelector('svg.plot').getAttribute('width'),
            paths: [...strip.querySelectorAll('svg.plot path')]
                .map((path) => path.getAttribute('d').length),
        }))""")
        assert [strip["id"] for strip in strips] == [
            "speedup", "acceptance", "length", "tpot", "ttft", "e2e", "step", "size", "queue",
            "cache", "waste",
        ]  # fmt: skip
        assert len({(strip["left"], strip["width"]) for strip in strips}) == 1
        assert all(length > 100 for strip in strips for length in strip["paths"])
        assert page.run("document.querySelectorAll('#axis .event-mark').length") == 3
        assert "(E2E − TTFT)/(n − 1)" in page.text("[data-strip=tpot] figcaption")  # noqa: RUF001

    def test_a_gap_in_the_data_is_a_gap_in_the_line(self, open_page: Open) -> None:
        page = open_page()
        assert (
            page.run(
                "document.querySelector('[data-strip=tpot] path')"
                ".getAttribute('d').match(/M/g).length"
            )
            == 2
        )

    def test_pointing_at_one_strip_reads_all(self, open_page: Open) -> None:
        page = open_page()
        page.run("document.getElementById('pause').click()")
        box = page.run(
            "(({left, top, width}) => [left, top, width])"
            "(document.querySelector('[data-strip=ttft] .plot-box').getBoundingClientRect())"
        )
        to_s = int(page.run("+document.querySelector('#axis').ariaValueMax")) + 1
        page.point(box[0] + box[2] * 250 / 300, box[1] + 20)  # 50 s before the right end
        page.wait("document.querySelectorAll('line.cursor[visibility=visible]').length === 11")
        assert (
            abs(int(page.run("+document.querySelector('#axis').ariaValueNow")) - (to_s - 50)) <= 1
        )
        # Below break-even it warns, although most drafts are accepted.
        assert page.run("document.querySelector('[data-strip=speedup] dd').className") == "bad"
        assert int(page.text("[data-strip=acceptance] dd").removesuffix(" %")) > 70

    def test_a_costly_minute_looks_costly_although_drafts_are_accepted(
        self, open_page: Open
    ) -> None:
        page = open_page()
        verdict = module(page, """
            const { judge } = await load("verdict");
            return judge({}, { steps: 9, speedup: 0.8, acceptance_rate: 0.89 });
        """)  # fmt: skip
        assert verdict["level"] == "bad"
        assert (
            verdict["text"]
            == "No: at 0.80 × it costs more than it saves, over 9 steps, 89 % of drafts accepted."  # noqa: RUF001
        )
        bad = page.run("getComputedStyle(document.querySelector('.line.bad')).stroke")
        good = page.run("getComputedStyle(document.querySelector('.line.good')).stroke")
        assert bad != good

    def test_speedup_is_weighted_by_time(self, open_page: Open) -> None:
        page = open_page()
        got = module(page, """
            const { summarize } = await load("verdict");
            return summarize([
                { steps: 10, drafted: 20, accepted: 10, speedup: 2, verify_ms: 10,
                  mean_acceptance_length: 2 },
                { steps: 30, drafted: 60, accepted: 60, speedup: 0.5, verify_ms: 30,
                  mean_acceptance_length: 3 },
                { steps: 0, drafted: null, accepted: null, speedup: null },
            ]);
        """)  # fmt: skip
        assert got["speedup"] == pytest.approx((10 * 10 * 2 + 30 * 30 * 0.5) / (10 * 10 + 30 * 30))
        assert got["acceptance_rate"] == pytest.approx(70 / 80)
        assert got["mean_acceptance_length"] == pytest.approx(2.75)

    def test_bars_are_tables_with_counts(self, open_page: Open) -> None:
        page = open_page()
        page.wait("document.querySelector('#by-position tbody') !== null")
        rows = (
            "[...document.querySelectorAll('#{} tbody tr')]"
            ".map((tr) => [...tr.cells].map((cell) => cell.textContent))"
        )
        assert page.run(rows.format("by-position"))[0] == ["1", "", "86 %", "774 / 900"]
        assert page.run(rows.format("histogram"))[0] == ["0", "", "24 %", "210"]
        assert page.run(rows.format("idle"))[0] == ["no match", "", "80 %", "1,801"]

    def test_the_charts_are_there_as_text_and_as_a_table(self, open_page: Open) -> None:
        page = open_page()
        assert re.search(
            r"p50: latest [\d.]+ ms, from [\d.]+ ms to [\d.]+ ms", page.text("#about-tpot")
        )
        page.run("document.querySelector('#numbers summary').click()")
        page.wait("document.querySelectorAll('#table tbody tr').length === 120")
        heads = page.run(
            "[...document.querySelectorAll('#table thead th')].map(th => th.textContent)"
        )
        assert heads[0] == "Time"
        assert "TPOT: p99" in heads

    def test_an_event_moves_the_cursor_to_its_time(self, open_page: Open, script: Script) -> None:
        page = open_page()
        page.wait("document.querySelector('#event-list button') !== null")
        page.run("document.querySelector('#event-list li:nth-child(2) button').click()")
        assert (
            page.run("+document.querySelector('#axis').ariaValueNow") == int(script.started_s) - 70
        )
        assert "steps cost 1.9 times" in page.text(".cursor-tag")

    def test_empty_says_what_to_do(self, open_page: Open, script: Script) -> None:
        script.empty = True
        page = open_page()
        page.wait("!document.getElementById('strips-empty').hidden")
        for place in ("#strips-empty", "#verdict", "#by-position", "#histogram", "#chat-empty"):
            assert "Send a message" in page.text(place)
        assert page.complaints == []


class TestPolling:
    def test_asks_since_the_last_bin(self, open_page: Open, script: Script) -> None:
        page = open_page()
        page.wait("document.getElementById('model').textContent === 'smollm2-135m'")
        end_s = time.monotonic() + 10
        while len(script.since) < 3 and time.monotonic() < end_s:
            time.sleep(0.05)
        assert script.since[0] is None
        assert all(abs(float(since or 0) - time.time()) < 5 for since in script.since[1:3])

    def test_a_bin_sent_again_replaces_the_old_one(self, open_page: Open) -> None:
        page = open_page()
        got = module(page, """
            const { Store } = await load("store");
            const store = new Store();
            const seen = [];
            const merge = (uptime_s, time_s, steps, events) => {
                store.merge({ uptime_s, series: { time_s, steps }, events });
                seen.push([store.since, store.rows.map((row) => [row.time_s, row.steps])]);
            };
            const event = { time_s: 11, kind: "k", text: "t" };
            merge(5, [10, 11, 12], [1, 2, 3], [event]);
            merge(6, [12, 13], [9, 4], [event]);
            merge(7, [], [], []);
            merge(8, [11], [7], [{ ...event, text: "u" }]);
            const events = store.events.map((e) => e.text);
            merge(9, [13 + 900], [5], []);
            merge(1, [13 + 902], [6], []);
            return { seen, events };
        """)  # fmt: skip
        assert got["seen"][:4] == [
            [12, [[10, 1], [11, 2], [12, 3]]],
            [13, [[10, 1], [11, 2], [12, 9], [13, 4]]],
            [13, [[10, 1], [11, 2], [12, 9], [13, 4]]],
            [13, [[10, 1], [11, 7], [12, 9], [13, 4]]],
        ]
        assert got["events"] == ["t", "u"]
        assert got["seen"][4] == [913, [[913, 5]]]  # older than it keeps
        assert got["seen"][5] == [915, [[915, 6]]]  # a restarted server starts anew

    def test_backs_off_on_errors_and_comes_back(self, open_page: Open, script: Script) -> None:
        page = open_page()
        script.state_status = 503
        page.wait("document.getElementById('status').textContent.includes('asking again in 2 s')")
        script.state_status = 200
        page.wait("document.getElementById('status').textContent === 'ready'")

    def test_pause_keeps_the_picture(self, open_page: Open) -> None:
        page = open_page()
        page.run("document.getElementById('pause').click()")
        drawn = "document.querySelector('[data-strip=tpot] path').getAttribute('d')"
        before = page.run(drawn)
        time.sleep(2.2)
        assert page.run(drawn) == before
        page.run("document.getElementById('pause').click()")
        assert page.run(drawn) != before


class TestParts:
    def test_numbers_have_units_and_sensible_digits(self, open_page: Open) -> None:
        wanted = {
            "ms(0.4219)": "0.42 ms", "ms(8.14159)": "8.14 ms", "ms(41.53)": "41.5 ms",
            "ms(1930)": "1.93 s", "ms(null)": "–", "percent(0.4567)": "46 %", "percent(0)": "0 %",  # noqa: RUF001
            "percent(0.0123)": "1.2 %", "times(1.837)": "1.84 ×", "count(1234567)": "1,234,567",  # noqa: RUF001
            "number(1234.5)": "1,235", "number(9)": "9", "number(2.5)": "2.5", "seconds(0)": "0 s",
            "seconds(214.6)": "3 min 35 s", "seconds(-4.26)": "-4.3 s",
            "seconds(119.7)": "2 min 0 s",
            "seconds(8000)": "2 h 13 min", "plural(1, 'step')": "1 step",
        }  # fmt: skip
        calls = ", ".join(f"f.{call}" for call in wanted)
        got = module(open_page(), f'const f = await load("format"); return [{calls}];')
        assert dict(zip(wanted, got, strict=True)) == wanted

    def test_events_survive_any_cut_of_the_bytes(self, open_page: Open) -> None:
        stream = (
            'data: {"a":"é\u2028👩‍🚀"}\n\n: comment\n\ndata:x\r\n\r\ndata: 1\ndata: 2\n\n'
            "data: [DONE]\n\ndata: no\n\n"
        )
        got = module(open_page(), f"""
            const {{ readEvents }} = await load("sse");
            const bytes = new TextEncoder().encode({json.dumps(stream)});
            const all = [];
            for (const cut of [1, 2, 3, 7, 1000]) {{
                const body = new ReadableStream({{ start(c) {{
                    for (let i = 0; i < bytes.length; i += cut) c.enqueue(bytes.slice(i, i + cut));
                    c.close();
                }} }});
                all.push([]);
                for await (const data of readEvents(body)) all.at(-1).push(data);
            }}
            return all;
        """)  # fmt: skip
        assert got == [['{"a":"é\u2028👩‍🚀"}', "x", "1\n2"]] * 5

    def test_axis_ends_are_round_and_hold_the_data(self, open_page: Open) -> None:
        got = module(open_page(), """
            const { niceCeil, domain } = await load("scale");
            return [[0.37, 1, 7, 14.2, 46, 230, 0].map(niceCeil), domain([], {}),
                domain([3, 9], { low: 1 }), domain([0.2], { high: 1 }),
                domain([1.2], { atLeast: 2 })];
        """)  # fmt: skip
        assert got == [[0.4, 1, 8, 15, 50, 250, 1], [0, 1], [1, 9], [0, 1], [0, 2]]
