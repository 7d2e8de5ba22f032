"The server as its clients see it: real sockets on loopback, a process of its own, OpenAI's Python client."
import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import mlx_spark
import mlx.core as mx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_logits_processors
from server_process import ServerProcess

from mlx_spark.cli import main
from mlx_spark.expert_file import pack_experts
from mlx_spark.generate import compare_ids, stream_generate
from mlx_spark.targets import load, save_tiny
from mlx_spark.verify import Sampling

LONG = 20_000   # tokens of an answer that nobody waits for


@pytest.fixture(scope="module")
def tiny(tmp_path_factory): return str(save_tiny(tmp_path_factory.mktemp("models") / "tiny", "llama"))


@pytest.fixture(scope="module")
def target(tiny): return load(tiny)


@pytest.fixture(scope="module")
def server(tiny):
    "A drafter that is often right: the target in 6 bits."
    flags = ["--model", tiny, "--draft-model", tiny, "--draft-bits", "6", "--num-draft-tokens", "4", "--max-tokens", "8", "--prompt-cache-gb", "0.002",
             "--header-timeout", "1", "--body-timeout", "1", "--max-body", "200000", "--queue", "300"]
    with ServerProcess(*flags) as process:
        yield process
        assert process.health()["status"] == "ok"
        assert process.stop() == 0
        assert not any("Traceback" in line for line in process.said), "".join(process.said)


@pytest.fixture(scope="module")
def client(server): return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def post(server, path="/v1/completions", **body): return httpx.post(server.url + path, json=body, timeout=60)


def asked(text): return [{"role": "user", "content": text}]


def chat_ids(tokenizer, text): return tokenizer.apply_chat_template(asked(text), add_generation_prompt=True)


def alone(target, prompt, n, **options):
    "What `mlx_spark generate` says: text, ids, log-probabilities of these ids, reason."
    said = list(stream_generate(*target, prompt, max_tokens=n, **options))
    return "".join(r.text for r in said), [int(r.token) for r in said], [r.logprobs[r.token].item() for r in said], said[-1].finish_reason


def same(target, prompt, plain, other):
    "Whether ids are those of plain decoding, but for a tie."
    differ = compare_ids(target[0], mx.array(prompt), plain, other)
    return differ is None or differ.tie


# ---- the official client ----

def test_chat_is_what_generate_says(client, target):
    text, ids, logprobs, reason = alone(target, chat_ids(target[1], "hello"), 40)
    answer = client.chat.completions.create(model="default_model", messages=asked("hello"), max_tokens=40, logprobs=True, top_logprobs=3,
                                            extra_body={"return_token_ids": True})
    choice = answer.choices[0]
    assert (choice.message.content, choice.token_ids, choice.finish_reason) == (text, ids, reason)
    assert [t.logprob for t in choice.logprobs.content] == pytest.approx(logprobs, abs=1e-4)
    for token in choice.logprobs.content: assert token.logprob == token.top_logprobs[0].logprob and len(token.top_logprobs) == 3
    assert answer.usage.completion_tokens == 40 and answer.usage.prompt_tokens == len(chat_ids(target[1], "hello"))
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 10 and details.rejected_prediction_tokens >= 0


def test_stream_adds_up(client, target):
    text, ids, _, _ = alone(target, chat_ids(target[1], "stream"), 30)
    stream = client.chat.completions.create(model="tiny", messages=asked("stream"), max_completion_tokens=30, stream=True,
                                            stream_options={"include_usage": True}, extra_body={"return_token_ids": True})
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == text
    assert sum((getattr(c.choices[0], "token_ids", []) for c in chunks), []) == ids
    assert [c.choices[0].finish_reason for c in chunks[-2:]] == [None, "length"]
    assert last.choices == [] and last.usage.completion_tokens == 30
    assert len(chunks) < 30   # more than a token in a round


def test_completions(client, target):
    text, ids, logprobs, _ = alone(target, "once upon", 12)
    answer = client.completions.create(model="tiny", prompt="once upon", max_tokens=12, logprobs=2, extra_body={"return_token_ids": True})
    choice = answer.choices[0]
    assert (choice.text, choice.token_ids) == (text, ids)
    assert choice.logprobs.token_logprobs == pytest.approx(logprobs, abs=1e-4)
    assert len(choice.logprobs.top_logprobs[3]) == 2 and len(choice.logprobs.text_offset) == 12
    streamed = client.completions.create(model="tiny", prompt=list(b"once upon"), max_tokens=12, stream=True)
    assert "".join(c.choices[0].text for c in streamed) == text


@pytest.mark.parametrize("as_list", (False, True))
def test_stop_across_tokens(client, target, as_list):
    text = alone(target, "stop here", 40)[0]
    at = next(i for i in range(5, 30) if text[i:i + 3].isascii() and text.index(text[i:i + 3]) == i)
    stop = text[at:at + 3]
    many = dict(model="tiny", prompt="stop here", max_tokens=40, stop=["\x00never", stop] if as_list else stop)
    answer = client.completions.create(**many)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text[:at], "stop")
    assert "".join(c.choices[0].text for c in client.completions.create(**many, stream=True)) == text[:at]


def test_seed(client, target):
    def ask(prompt="dice", **options):
        return client.completions.create(model="tiny", prompt=prompt, max_tokens=24, temperature=1.0, **options).choices[0].text
    once = ask(seed=7)
    with ThreadPoolExecutor(8) as pool: many = list(pool.map(lambda i: ask(seed=7) if i % 2 else ask(prompt=f"noise {i}", seed=i), range(8)))
    assert all(many[i] == once for i in range(1, 8, 2))
    assert len({once, ask(seed=8), ask(seed=-1), ask()}) == 4
    assert ask(seed=7, extra_body={"num_draft_tokens": 0}) == once
    assert once == alone(target, "dice", 24, sampler=Sampling(temp=1.0), seed=7)[0]


def test_processors(client, target):
    processors = lambda: make_logits_processors(logit_bias={84: -100.0}, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25)
    ids = alone(target, "again and again", 30, logits_processors=processors())[1]
    answer = client.completions.create(
        model="tiny", prompt="again and again", max_tokens=30, logit_bias={"84": -100}, presence_penalty=0.5, frequency_penalty=0.25,
        extra_body={"repetition_penalty": 1.3, "return_token_ids": True})
    assert len(answer.choices[0].token_ids) == 30 and 84 not in answer.choices[0].token_ids
    assert answer.choices[0].token_ids == ids != alone(target, "again and again", 30)[1]


SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["S", "M", "L"]}}, "required": ["ok", "size"], "additionalProperties": False}


@pytest.mark.parametrize("draft", (None, 0))
def test_json_schema(client, draft):
    form = {"type": "json_schema", "json_schema": {"name": "shirt", "schema": SCHEMA, "strict": True}}
    for seed in range(3):
        answer = client.chat.completions.create(model="tiny", messages=asked("a shirt"), max_tokens=300, temperature=1, seed=seed, response_format=form,
                                                extra_body={} if draft is None else {"num_draft_tokens": draft})
        shirt = json.loads(answer.choices[0].message.content)
        assert set(shirt) == {"ok", "size"} and shirt["size"] in ("S", "M", "L") and answer.choices[0].finish_reason == "stop"


def test_no_drafts(client, target):
    for n in (0, None):
        answer = client.completions.create(model="tiny", prompt="hello you", max_tokens=20, extra_body={"num_draft_tokens": n, "return_token_ids": True})
        assert answer.choices[0].token_ids == alone(target, "hello you", 20)[1]
        details = answer.usage.completion_tokens_details
        assert (details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0) == (n is None)


def test_next_turn_is_reused(client, target):
    say = lambda turns: client.chat.completions.create(model="tiny", messages=turns, max_tokens=24, extra_body={"return_token_ids": True})
    turns = asked("x" * 40)
    first, again = say(turns), say(turns)
    assert first.choices[0].token_ids == again.choices[0].token_ids
    n = first.usage.prompt_tokens
    assert (first.usage.prompt_tokens_details.cached_tokens, again.usage.prompt_tokens_details.cached_tokens) == (0, 0)   # this source's state can't be cut
    prompt = [*target[1].apply_chat_template(turns, add_generation_prompt=True), *first.choices[0].token_ids, *b" and?"]
    third = client.completions.create(model="tiny", prompt=prompt, max_tokens=24, extra_body={"return_token_ids": True})
    assert third.usage.prompt_tokens_details.cached_tokens == n + 23   # all but the last token, which had not been fed
    assert third.choices[0].token_ids == alone(target, prompt, 24)[1]
    assert third.usage.completion_tokens_details.accepted_prediction_tokens > 8


def test_models(client, server, tiny):
    assert [m.id for m in client.models.list()] == [tiny]
    assert client.models.retrieve("tiny").id == tiny
    with pytest.raises(openai.NotFoundError): client.models.retrieve("gpt-4")


def test_client_sees_errors(client):
    with pytest.raises(openai.BadRequestError) as e: client.chat.completions.create(model="tiny", messages=asked("x"), temperature=-1)
    assert (e.value.param, e.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as e: client.chat.completions.create(model="gpt-4", messages=asked("x"))
    assert e.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as e: client.chat.completions.create(model="tiny", messages=asked("x"), n=2, stream=True)
    assert e.value.param == "n"


def test_asynchronous_clients(server, target):
    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            ask = lambda i: client.completions.create(model="tiny", prompt=f"number {i}", max_tokens=10 + i, extra_body={"return_token_ids": True})
            return await asyncio.gather(*map(ask, range(12)))
    for i, answer in enumerate(asyncio.run(all_of_them())):
        assert same(target, list(f"number {i}".encode()), alone(target, f"number {i}", 10 + i)[1], answer.choices[0].token_ids)


# ---- load ----

@pytest.fixture(scope="module")
def crowd(tiny):
    with ServerProcess("--model", tiny, "--draft-model", "ngram", "--prompt-cache-gb", "0.002", "--quiet") as process: yield process


def test_load(crowd, target):
    jobs = {(c, r): (f"client {c} asks {r}: " + "z" * (7 * c % 50 + 13 * r % 90), 4 + (5 * c + 3 * r) % 20) for c in range(16) for r in range(8)}
    expected = {k: alone(target, *job)[1] for k, job in jobs.items()}
    assert len(set(map(tuple, expected.values()))) > 120
    def one_client(c):
        out = {}
        with httpx.Client(timeout=120) as http:
            for r in range(8):
                prompt, n = jobs[c, r]
                body = {"prompt": prompt, "max_tokens": n, "return_token_ids": True, "user": f"{c}.{r}"}
                out[c, r] = http.post(f"{crowd.url}/v1/completions", json=body).json()
        return out
    active = []
    for _ in range(3):
        with ThreadPoolExecutor(16) as pool: answers = {k: v for out in pool.map(one_client, range(16)) for k, v in out.items()}
        for k, answer in answers.items():
            assert same(target, list(jobs[k][0].encode()), expected[k], answer["choices"][0]["token_ids"]), k
        while crowd.health()["running"]: time.sleep(0.05)
        time.sleep(0.6)   # numbers are copied when the loop is idle
        active.append(crowd.metric('mlx_spark_memory_bytes{purpose="mlx_active"}'))
    assert min(active[1:]) <= active[0] * 1.05 + 1e5 and max(active) <= min(active) + 1e6, active   # buffers shrink in steps
    assert crowd.metric('mlx_spark_memory_bytes{purpose="prompt_cache"}') <= 2e6


def test_same_beginning_is_reused(crowd, target):
    "This drafter's state can be cut, so that prompts need only begin alike."
    start = "You are a parrot. " * 4
    for i, text in enumerate((start + "Hello!", start + "Hello!", start + "Who?")):
        answer = post(crowd, prompt=text, max_tokens=16, return_token_ids=True).json()
        assert answer["choices"][0]["token_ids"] == alone(target, text, 16)[1]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == (0, len(text) - 1, len(start))[i]


# ---- faults ----

@pytest.mark.parametrize("body,said", [
    ({"prompt": "x", "max_tokens": -1}, "max_tokens: must be in 1.."), ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 10**12}, "max_tokens"), ({"prompt": "x", "max_tokens": 40_000}, "32768 positions, and 1 tokens of prompt with 40000"),
    ({"prompt": ""}, "the prompt is empty"), ({"prompt": []}, "the prompt is empty"), ({}, "prompt: text or token ids are wanted"),
    ({"prompt": "y" * 40_000}, "32768 positions, and 40000 tokens"), ({"prompt": "x", "temperature": "hot"}, "temperature: a number"),
    ({"prompt": "x", "stop": 5}, "stop"), ({"prompt": "x", "stream": "yes"}, "stream"), ({"prompt": "x", "logprobs": True}, "logprobs: a whole number"),
    ({"prompt": [1, -5]}, "0..287, got -5"), ({"prompt": "x", "best_of": 4}, "best_of"), ({"prompt": "x", "model": 7}, "model"),
    ({"prompt": "x", "logit_bias": {"300": 1}}, "0..287, got '300'"), ({"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {}}}, "schema is wanted"),
    ({"prompt": "x", "seed": 2**70}, "seed"), ({"prompt": "x", "num_draft_tokens": -1}, "num_draft_tokens"), ({"prompt": "x", "domain": 5}, "domain: a name is wanted"),
])
def test_what_is_wrong_is_said(server, body, said):
    answer = post(server, **body)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b'{"prompt": "\xff\xfe"}', b'{"prompt": "\\ud800"}', b'{"prompt": NaN}', b"[" * 50_000,
                                  b"\x00" * 100, b'{"prompt": "x", "max_tokens": ' + b"9" * 5_000 + b"}", '{"prompt": "x"}'.encode("utf-16")])
def test_no_json(server, data):
    answer = httpx.post(f"{server.url}/v1/completions", content=data, timeout=20)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


def test_other_paths_and_methods(server):
    for method, path, status in (("GET", "/v1/completions", 405), ("POST", "/v1/models", 405), ("GET", "/", 404), ("DELETE", "/v1/chat/completions", 405)):
        answer = httpx.request(method, server.url + path)
        assert answer.status_code == status and answer.json()["error"]["message"]


def test_memory_is_reckoned_before(tiny):
    with ServerProcess("--model", tiny, "--memory-limit-gb", "0.02", "--prompt-cache-gb", "0") as small:
        answer = post(small, prompt="x", max_tokens=20_000)
        assert answer.status_code == 400 and "20000 tokens need" in answer.json()["error"]["message"] and "GB are there" in answer.text
        assert post(small, prompt="x", max_tokens=5).status_code == 200


def test_twenty_megabytes(server):
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x" * 300_000})
    assert answer.status_code == 413 and "200000 bytes" in answer.json()["error"]["message"]
    with suppress(httpx.WriteError, httpx.ReadError):   # far too large: the server may close while we are still sending
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x" * 20_000_000}).status_code == 413
    assert post(server, prompt="x").status_code == 200


def read_all(sock):
    sock.settimeout(10)
    data = b""
    while piece := sock.recv(65536): data += piece
    return data


def test_slow_loris(server):
    with socket.create_connection(server.address) as silent, socket.create_connection(server.address) as headers, socket.create_connection(server.address) as body:
        headers.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        body.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        begun = time.monotonic()
        while time.monotonic() - begun < 0.8:
            headers.sendall(b"a")
            time.sleep(0.2)
        with suppress(ConnectionResetError): assert read_all(headers) == b""
        assert b"408" in read_all(body).split(b"\r\n")[0]
        with suppress(ConnectionResetError): assert read_all(silent) == b""
        assert time.monotonic() - begun < 5
    assert post(server, prompt="x").status_code == 200


def test_client_gone(server):
    for stream in (True, False):
        body = json.dumps({"prompt": "gone", "max_tokens": LONG, "stream": stream}).encode()
        with socket.create_connection(server.address) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            if stream: assert b"text/event-stream" in sock.recv(4096)
            while server.health()["running"] != 1: time.sleep(0.02)
        begun = time.monotonic()
        while server.health()["running"]: assert time.monotonic() - begun < 3
    assert post(server, prompt="x").status_code == 200


def test_domain_with_experts_on_disk(tmp_path):
    model = str(save_tiny(tmp_path / "moe", "qwen3_moe"))
    pack_experts(model, tmp_path / "experts", progress=False)
    flags = ["--model", model, "--expert-offload", str(tmp_path / "experts"), "--expert-budget", "60%", "--draft-model", "ngram"]
    with ServerProcess(*flags, MLX_SPARK_CACHE=str(tmp_path / "cache")) as process:
        body = {"prompt": "def f(x):", "max_tokens": 12, "return_token_ids": True}
        with ThreadPoolExecutor(3) as pool: answers = list(pool.map(lambda d: post(process, **body, domain=d), ("coding", None, "chat")))
        plain = alone(load(model), body["prompt"], 12)[1]
        for answer in answers: assert answer.json()["choices"][0]["token_ids"] == plain
        answer = post(process, **body, domain="../../etc")
        assert answer.status_code == 400 and "a domain is named by up to 64 letters" in answer.json()["error"]["message"]
        assert process.stop() == 0
    profiles = {p.stem.split("--")[-1] for p in (tmp_path / "cache").rglob("*.json") if "profiles" in str(p)}
    assert any("coding" in p for p in profiles) and any("chat" in p for p in profiles), profiles


# ---- a small server: one row, one place in the queue, a key ----

@pytest.fixture(scope="module")
def small(tiny):
    flags = ["--model", tiny, "--max-rows", "1", "--queue", "1", "--api-key", "sesame", "--cors-origin", "https://mine.example", "--timeout", "2"]
    with ServerProcess(*flags) as process: yield process


@pytest.fixture(scope="module")
def keyed(small): return openai.OpenAI(base_url=f"{small.url}/v1", api_key="sesame", max_retries=0, timeout=60)


def test_key(small, keyed):
    wrong = openai.OpenAI(base_url=f"{small.url}/v1", api_key="sesamE", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as e: wrong.models.list()
    assert e.value.code == "invalid_api_key"
    assert len(keyed.models.list().data) == 1 and small.health()["status"] == "ok"
    assert httpx.get(f"{small.url}/metrics").status_code == 401


def test_origins(small, server):
    ask = lambda url, origin, method="GET": httpx.request(method, f"{url}/v1/models", headers={
        "Origin": origin, "Authorization": "Bearer sesame", "Access-Control-Request-Method": "GET"})
    assert ask(small.url, "https://mine.example").headers["access-control-allow-origin"] == "https://mine.example"
    assert ask(small.url, "https://mine.example", "OPTIONS").status_code == 200
    assert ask(small.url, "https://other.example").status_code == 403
    assert "access-control-allow-origin" not in ask(server.url, server.url).headers
    assert (ask(server.url, server.url).status_code, ask(server.url, "https://mine.example").status_code) == (200, 403)


def test_full_queue(small, keyed):
    ask = lambda: keyed.completions.create(model="tiny", prompt="busy", max_tokens=LONG, stream=True)
    streams = [ask(), ask()]
    with pytest.raises(openai.RateLimitError) as e: ask()
    assert 1 <= int(e.value.response.headers["retry-after"]) <= 60 and e.value.code == "queue_full"
    for s in streams: s.close()
    begun = time.monotonic()
    while small.health()["running"]: assert time.monotonic() - begun < 3
    assert keyed.completions.create(model="tiny", prompt="free again", max_tokens=2).usage.completion_tokens == 2


def test_timeout(keyed):
    with pytest.raises(openai.APIError) as e: list(keyed.completions.create(model="tiny", prompt="slow", max_tokens=LONG, stream=True))
    assert e.value.code == "timeout"
    with pytest.raises(openai.APIStatusError) as e: keyed.completions.create(model="tiny", prompt="slow", max_tokens=LONG)
    assert e.value.status_code == 504


# ---- the end ----

def test_terminated_mid_stream(tiny):
    with ServerProcess("--model", tiny, "--grace", "2") as process:
        ask = lambda n: httpx.stream("POST", f"{process.url}/v1/completions", json={"prompt": "last words", "max_tokens": n, "stream": True}, timeout=30)
        with ask(LONG) as endless, ask(60) as short:
            long_lines, short_lines = endless.iter_lines(), short.iter_lines()
            next(long_lines), next(short_lines)
            process.process.send_signal(signal.SIGTERM)
            assert [line for line in short_lines if line][-1] == "data: [DONE]"
            last = [line for line in long_lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the server is shutting down"
        assert process.process.wait(20) == 0
        assert not any("Traceback" in line or "terminate" in line for line in process.said), process.said


@pytest.mark.parametrize("sig", (signal.SIGTERM, signal.SIGINT))
def test_terminated_when_idle(tiny, sig):
    with ServerProcess("--model", tiny, "--draft-model", "ngram") as process:
        assert post(process, prompt="x", max_tokens=3).status_code == 200
        begun = time.monotonic()
        assert process.stop(sig) == 0 and time.monotonic() - begun < 5


def test_what_cannot_be_served(tiny, tmp_path, capsys):
    other = str(save_tiny(tmp_path / "recurrent", "qwen3_next"))
    for flags, said in ((["--model", tiny, "--draft-model", "nobody"], "no draft model"), (["--model", "/no/such"], "/no/such"),
                        (["--model", other, "--draft-model", "ngram"], "the drafter ngram cannot be used: "), (["--model", tiny, "--temp", "-1"], "temp must be finite"),
                        (["--model", tiny, "--host", "300.0.0.1"], "cannot serve at 300.0.0.1")):
        assert main(["serve", "--port", "0", *flags]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and said in err


def test_without_the_extra():
    code = "import sys; sys.modules['starlette.applications'] = None; from mlx_spark.cli import main; sys.exit(main(['serve']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "pip install 'mlx_spark[serve]'" in done.stderr


# ---- fuzz ----

anything = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.integers(-10, 300),
                        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=8)
FIELDS = ("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "n", "stream",
          "stream_options", "logprobs", "top_logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty", "repetition_context_size", "logit_bias",
          "response_format", "tools", "tool_choice", "num_draft_tokens", "domain", "chat_template_kwargs", "echo", "suffix", "user", "return_token_ids")
message = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": st.text(max_size=30) | anything})
schema = st.fixed_dictionaries({"type": st.sampled_from(["object", "string", "integer", "null", "array", "nonsense"]), "properties": anything, "pattern": anything})
likely = {
    "messages": st.lists(message, max_size=3), "prompt": st.text(max_size=30) | st.lists(st.integers(-1, 300), max_size=9), "stop": st.text(max_size=3),
    "max_tokens": st.integers(1, 9), "temperature": st.floats(0, 3), "top_p": st.floats(0, 1), "top_k": st.integers(0, 400), "seed": st.integers(),
    "n": st.just(1), "logprobs": st.booleans() | st.integers(0, 22), "num_draft_tokens": st.integers(0, 40), "stream": st.booleans(),
    "logit_bias": st.dictionaries(st.integers(0, 290).map(str), st.floats(-101, 101), max_size=3), "stream_options": st.just({"include_usage": True}),
    "response_format": st.fixed_dictionaries({"type": st.just("json_schema"), "json_schema": st.fixed_dictionaries({"schema": schema})}),
}
bodies = st.fixed_dictionaries({}, optional={name: likely.get(name, anything) | (anything if name in likely else st.nothing()) for name in FIELDS})


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(body=bodies, chat=st.booleans())
def test_fuzz(server, body, chat):
    body.setdefault("max_tokens", 3)
    if body.get("model") not in (None, "tiny"): body["model"] = body["model"] if isinstance(body["model"], int) else "tiny"
    data = json.dumps(body).encode()   # NaN and infinities as Python writes them
    answer = httpx.post(f"{server.url}/v1/{'chat/' if chat else ''}completions", content=data, timeout=30)
    assert answer.status_code in (200, 400, 404), (answer.status_code, answer.text, body)
    if answer.status_code != 200: assert answer.json()["error"]["message"]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.binary(max_size=200), head=st.sampled_from([b"", b"POST /v1/completions HTTP/1.1\r\n", b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\n\r\n"]))
def test_fuzz_bytes(server, data, head):
    with socket.create_connection(server.address) as sock, suppress(ConnectionError):
        sock.sendall(head + data)
        sock.shutdown(socket.SHUT_WR)
        answer = read_all(sock)
        assert not answer.startswith((b"HTTP/1.1 5",)), answer


# ---- the embedded model ----

@pytest.mark.weights
def test_embedded_default():
    with ServerProcess() as process:
        answer = post(process, "/v1/chat/completions", messages=asked("What is the capital of France?"), max_tokens=20).json()
        assert "Paris" in answer["choices"][0]["message"]["content"] and answer["model"] == "smollm2-135m"
        assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
        again = post(process, "/v1/chat/completions", messages=asked("What is the capital of France?"), max_tokens=20, num_draft_tokens=4).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"] - 1
        assert again["choices"][0]["message"] == answer["choices"][0]["message"]
        assert again["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 3   # the drafter's context came along
        assert process.stop() == 0
