"""Records what a real server answers, as fixtures of the wire tests in src/capture/engine/.

usage: record.py sglang|vllm|llama.cpp URL OUT_DIR [MODEL_DIR]

Each file holds {"path", "request", "status", "body"}: the body is the text as it came, with the model's folder named
MODEL_DIR. Start the servers with the scripts in ../shared/engines (SmolLM2-135M-Instruct).
"""
import json
import re
import sys
import threading
import time
import urllib.error
import urllib.request

engine, url, out = sys.argv[1:4]
model_dir = sys.argv[4] if len(sys.argv) > 4 else None
CAPITAL = [504, 3575, 282, 4649, 314]
HELLO = [1, 4093, 198, 19556, 2, 198, 1, 520, 9531, 198]
MESSAGES = [{"role": "user", "content": "hi"}]


def call(path, body=None, raw=None):
    data = raw if raw is not None else (json.dumps(body).encode() if body is not None else None)
    request = urllib.request.Request(url + path, data=data, headers={"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def keep(name, path, body=None, raw=None, only=None, answer=None):
    status, text = answer or call(path, body, raw)
    if only:
        text = "\n".join(line for line in text.split("\n") if re.search(only, line)) + "\n"
    if model_dir:
        text = text.replace(model_dir, "MODEL_DIR")
    record = {"path": path, "request": body, "status": status, "body": text}
    with open(f"{out}/{name}.json", "w") as file:
        file.write(json.dumps(record, indent=1) + "\n")
    print(name, status, text[:100].replace("\n", " "))
    return text


def in_background(path, body):
    box = {}
    thread = threading.Thread(target=lambda: box.setdefault("answer", call(path, body)))
    thread.start()
    return thread, box


if engine == "sglang":
    keep("model_info", "/model_info")
    info = json.loads(keep("server_info", "/server_info"))
    wanted = ["model_path", "tokenizer_path", "served_model_name", "version", "max_total_num_tokens", "max_running_requests",
              "max_req_input_len", "context_length", "kv_cache_dtype", "page_size", "mem_fraction_static", "tp_size",
              "dp_size", "dcp_size", "disable_radix_cache", "chunked_prefill_size", "enable_hierarchical_cache",
              "schedule_conservativeness", "schedule_policy", "max_queued_requests", "incremental_streaming_output",
              "internal_states"]
    state = {k: v for k, v in info["internal_states"][0].items() if k not in info}
    short = {k: info.get(k) for k in wanted} | {"internal_states": [state]}
    keep("server_info", "/server_info", answer=(200, json.dumps(short)))
    keep("models", "/v1/models")
    keep("loads", "/v1/loads?include=core,memory,queues")
    keep("tokenize", "/v1/tokenize", {"model": "x", "messages": MESSAGES, "add_generation_prompt": True})
    greedy = {"max_new_tokens": 8, "temperature": 0}
    keep("single", "/generate", {"rid": "one", "input_ids": CAPITAL, "sampling_params": greedy})
    keep("stop", "/generate", {"input_ids": HELLO, "sampling_params": {"max_new_tokens": 40, "temperature": 0}})
    keep("batch", "/generate", {"rid": ["a", "b"], "input_ids": [CAPITAL, HELLO], "sampling_params": [greedy, greedy]})
    keep("stream", "/generate", {"input_ids": CAPITAL, "stream": True, "sampling_params": greedy | {"stream_interval": 3}})
    keep("stream_batch", "/generate", {"input_ids": [CAPITAL, HELLO], "stream": True, "sampling_params": greedy})
    keep("too_long", "/generate", {"input_ids": [504] * 8200, "sampling_params": greedy})
    keep("too_long_stream", "/generate", {"input_ids": [504] * 8200, "stream": True, "sampling_params": greedy})
    keep("too_much", "/generate", {"input_ids": CAPITAL, "sampling_params": {"max_new_tokens": 9000}})
    keep("unknown_sampling", "/generate", {"input_ids": CAPITAL, "sampling_params": {"max_tokens": 3}})
    keep("bad_json", "/generate", raw=b"{bad")
    keep("empty", "/generate", {"input_ids": [], "sampling_params": greedy})
    long = {"rid": "gone", "input_ids": CAPITAL, "sampling_params": {"max_new_tokens": 900, "ignore_eos": True}}
    for name, stream in [("aborted", False), ("aborted_stream", True)]:
        body = long | {"stream": stream, "rid": name}
        thread, box = in_background("/generate", body)
        time.sleep(1.5)
        call("/abort_request", {"rid": name})
        thread.join()
        keep(name, "/generate", body, answer=box["answer"])
    thread, box = in_background("/generate", long | {"sampling_params": {"max_new_tokens": 60, "ignore_eos": True}})
    time.sleep(1.5)
    keep("metrics", "/metrics", only=r"^sglang:(num_running|num_queue_reqs|num_retracted|token_usage|kv_|max_total|num_used|"
         r"gen_throughput|generation_tokens_total|prompt_tokens_total)")
    thread.join()
elif engine == "sglang-full":  # a server with --max-running-requests 1 --max-queued-requests 1
    engine_body = {"input_ids": CAPITAL, "sampling_params": {"max_new_tokens": 120, "ignore_eos": True}}
    waits = []
    for _ in range(3):
        waits.append(in_background("/generate", engine_body))
        time.sleep(0.7)
    keep("queue_full", "/generate", engine_body)
    keep("queue_full_stream", "/generate", engine_body | {"stream": True})
    [thread.join() for thread, _ in waits]
elif engine == "vllm":
    model = json.loads(call("/v1/models")[1])["data"][0]["id"]
    base = {"model": model, "temperature": 0, "return_token_ids": True}
    shown = {"model": "MODEL_DIR", "temperature": 0, "return_token_ids": True}

    def complete(name, **more):
        answer = call("/v1/completions", base | more)
        keep(name, "/v1/completions", shown | more, answer=answer)

    keep("models", "/v1/models")
    keep("version", "/version")
    keep("tokenize", "/tokenize", {"messages": MESSAGES, "add_generation_prompt": True})
    keep("render", "/v1/chat/completions/render", {"messages": MESSAGES})
    complete("single", prompt=CAPITAL, max_tokens=8)
    complete("stop", prompt=HELLO, max_tokens=40)
    complete("batch", prompt=[CAPITAL, HELLO], max_tokens=8)
    complete("stream", prompt=HELLO, max_tokens=40, stream=True, stream_options={"include_usage": True})
    complete("outside", prompt=[504, 99999], max_tokens=4)
    complete("negative", prompt=[504, -1], max_tokens=4)
    complete("too_much", prompt=CAPITAL, max_tokens=4000)
    complete("too_much_stream", prompt=CAPITAL, max_tokens=4000, stream=True)
    complete("too_long", prompt=[504] * 2100, max_tokens=4)
    complete("empty", prompt=[], max_tokens=4)
    complete("unknown_model", model="nosuch", prompt=CAPITAL, max_tokens=4)
    keep("bad_json", "/v1/completions", raw=b"{bad")
    thread, box = in_background("/v1/completions", base | {"prompt": CAPITAL, "max_tokens": 300, "ignore_eos": True})
    time.sleep(1)
    keep("metrics", "/metrics", only=r"^vllm:(num_requests_(running|waiting)\{|kv_cache_usage|num_preemptions_total|"
         r"generation_tokens_total|prompt_tokens_total|cache_config_info)")
    thread.join()
elif engine == "llama.cpp":
    greedy = {"n_predict": 8, "temperature": 0, "return_tokens": True, "cache_prompt": False}
    keep("props", "/props")
    keep("models", "/v1/models")
    keep("health", "/health")
    keep("slots", "/slots")
    keep("tokenize", "/tokenize", {"content": "The capital of France is"})
    keep("apply_template", "/apply-template", {"messages": MESSAGES})
    keep("single", "/completion", greedy | {"prompt": CAPITAL})
    keep("stop", "/completion", greedy | {"prompt": HELLO, "n_predict": 40})
    keep("stream", "/completion", greedy | {"prompt": HELLO, "n_predict": 40, "stream": True})
    keep("stream_length", "/completion", greedy | {"prompt": CAPITAL, "stream": True})
    keep("outside", "/completion", greedy | {"prompt": [504, 99999]})
    keep("too_long", "/completion", greedy | {"prompt": [504] * 9000})
    keep("too_long_stream", "/completion", greedy | {"prompt": [504] * 9000, "stream": True})
    keep("empty", "/completion", greedy | {"prompt": []})
    keep("bad_json", "/completion", raw=b"{bad")
    thread, box = in_background("/completion", greedy | {"prompt": CAPITAL, "n_predict": 200, "ignore_eos": True})
    time.sleep(1)
    keep("metrics", "/metrics", only=r"^llamacpp:")
    keep("slots_busy", "/slots")
    thread.join()
else:
    sys.exit(f"no engine {engine}")
