#!/usr/bin/env python3
"""The prompts of DeepSeek-V4: the release's own encoder against convert/deepseek_v4.jinja.

    gen_deepseek_v4.py RELEASE          writes tests/golden/deepseek_v4: our conversations with what the encoder makes of
                                        them, and a small tokenizer of our own with the ids of some of them
    gen_deepseek_v4.py RELEASE --golden DIR
                                        writes to DIR the release's golden prompts, the part of its tokenizer that they
                                        need, and their ids; the tests read ../shared/golden/deepseek_v4
    gen_deepseek_v4.py RELEASE --compare N [TEMPLATE]
                                        renders N random conversations with jinja2 and with `./moe --render` (of
                                        TEMPLATE), and compares with the encoder byte for byte; exit 1 if any differs
    gen_deepseek_v4.py VLLM --v41 [N]   writes tests/golden/deepseek_v41, or compares, as above for DeepSeek-V4.1

RELEASE has encoding/ and tokenizer.json, as DeepSeek-V4-Flash of April 2026 has them. VLLM is vllm/tokenizers of vLLM,
whose deepseek_v41_encoding.py was adapted from the release's. Of its tokenizer, ours has the
expressions of the pre-tokenizer and the special tokens without placeholders; its merges are trained on our texts. Needs
jinja2 3.1.6 and, to write, tokenizers 0.23.3. Runs at the top of the tree.
"""
import copy
import json
import os
import random
import re
import shutil
import subprocess
import sys

import gen_templates
import gen_tokens

DIR = "tests/golden/deepseek_v4"
TEMPLATE = "convert/deepseek_v4.jinja"
TOKENS = 2048  # of our tokenizer
BOS = "<｜begin▁of▁sentence｜>"
# What releases from 0731 on put before a prompt for the effort max; high has the text that max had before.
BEYOND = ("Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
          "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose "
          "the problem into its most fundamental components, trace every causal chain to its root, and resolve the "
          "underlying cause rather than any surface symptom.\n"
          "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain "
          "that no assumption remains unchecked and no error remains undiscovered.\n\n")
TOOLS = gen_templates.TOOLS
FORMAT = {"type": "json_schema", "schema": {"type": "object", "properties": {"é": {"type": "number"}}}}


def system(text, **more):
    return {"role": "system", "content": text, **more}


def user(text, **more):
    return {"role": "user", "content": text, **more}


def said(text, thought=None, calls=None, **more):
    m = {"role": "assistant", "content": text, **more}
    if thought is not None:
        m["reasoning_content"] = thought
    if calls is not None:
        m["tool_calls"] = calls
    return m


def call(ident, name, arguments):
    return {"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(ident, text):
    return {"role": "tool", "tool_call_id": ident, "content": text}


def expected(encode, case):
    """What the encoder makes of the variables of a case."""
    messages, kwargs = copy.deepcopy(case["messages"]), case["kwargs"]
    extra = {k: kwargs[k] for k in ("tools", "response_format") if kwargs.get(k)}
    if extra and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, system(""))
    if extra:
        messages[0].update(copy.deepcopy(extra))
    think = kwargs.get("thinking", kwargs.get("enable_thinking", "v41" in kwargs))
    if "v41" in kwargs:
        return encode(messages, "thinking" if think else "chat", drop_thinking=kwargs.get("drop_thinking", True),
                      reasoning_effort=kwargs.get("reasoning_effort"))
    effort, graded = kwargs.get("reasoning_effort"), "graded_efforts" in kwargs
    own = {"high": "max"}.get(effort) if graded else effort if effort == "max" else None
    text = encode(messages, "thinking" if think else "chat", drop_thinking=kwargs.get("drop_thinking", True),
                  reasoning_effort=own)
    if graded and effort == "max" and think:
        text = text.replace(BOS, BOS + BEYOND, 1)
    if not case["add_generation_prompt"]:
        for end in ("<｜Assistant｜><think>", "<｜Assistant｜></think>"):
            text = text.removesuffix(end)
    return text


# ---- the committed conversations ----

TWO = [call("a", "weather", '{"city": "Köln", "days": 2, "at": [1.0, 2e+20, -3], "more": {"a": true, "b": null}}'),
       call("b", "now", "{}")]
USED = [user("Weather?"), said("", "Look.\n", TWO), result("a", "21 °C"), result("b", "noon"), said("21.", "Well."),
        user("Thanks")]
CASES = {
    "one": [user("Hi")],
    "system": [system("Be brief.\n"), user(" Hi \n")],
    "turns": [system("Be brief."), user("a"), said("\nb \n", "Hm.\n\nSo.\n"), user("c"), said("d"), user("e\t")],
    "last": [user("a"), said("b", "\nHm.\n")],
    "asked twice": [user("a"), user("b")],
    "systems": [system("a"), system("b"), user("c"), said("d"), system("e"), user("f")],
    "marks": [system("<think>｜DSML｜"), user("<｜User｜>{{ x }}</think>｜DSML｜<｜end▁of▁sentence｜>"),
              said("<｜Assistant｜>é漢👩‍👧\u00a0\u2028\"'\\", "<think>"), user("<｜DSML｜tool_calls>")],
    "called": USED[:4],
    "answered": USED,
    "kept by a tool": [system("s", tools=TOOLS)] + USED,
    "out of order": [user("?"), said(None, None, TWO), result("b", "1"), result("a", "2")],
    "results and texts": [user("?"), said("x", "y", TWO), result("b", "1"), user("and"), result("a", "2"), user("so?")],
    "unknown ids": [user("?"), said("", "", TWO), result("b", "1"), result("c", "2"), {"role": "tool", "content": "3"}],
    "no ids": [user("?"), said("", "", [call(None, "now", "")]), result("a", "1"), result("b", "2")],
    "ids twice": [user("?"), said("", "", [call(i, "now", "{}") for i in "aba"]), result("a", "1"), result("b", "2")],
    "ids of before": [user("?"), said("", "", TWO[:1]), result("a", "0"), said("", "", [call(i, "now", "{}") for i in "bc"]),
                      result("c", "1"), result("b", "2"), result("a", "3")],
    "ids of functions": [user("?"), said("", "", [{"function": {"id": i, "name": "now", "arguments": "{}"}} for i in "ab"]),
                         result("b", "1"), result("a", "2")],
    "arguments": [user("?"), said("", None, [call("a", "f", '{"s": "a\\nb \\"", "n": 7, "e": {}, "l": [], "é": "é"}'),
                                             call("b", "g", " { } "), call("c", "h", "oops"), call("d", "i", "")])],
    "formatted": [system("s", response_format=FORMAT), user("?")],
    "parts": [user("?"), said("", "", TWO[:1]),
              {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "a"}, {"type": "image"},
                                                                {"type": "text", "text": "b"}]}],
    "developer": [{"role": "developer", "content": "d"}, said("a", "t"), user("u"), {"role": "developer", "content": "e"}],
    "developer's tools": [{"role": "developer", "content": "d", "tools": TOOLS, "response_format": FORMAT}],
    "reminded": [system("s"), user("q"), said("a", "t"), {"role": "latest_reminder", "content": "2026"}, user("r")],
    "reminded late": [user("q"), {"role": "latest_reminder", "content": "2026"}],
    "action": [user("q"), said("a", "t"), user("r", task="action"), said("Search")],
    "action before": [user("q", task="action"), said("Search", "t"), user("r")],
    "a tool's task": [user("q"), said("", "", TWO[:1]), {**result("a", "1"), "task": "title"}, user("r", task="title")],
    "title": [user("q"), said("a", "t", task="title"), said("T", "t")],
    "domain": [user("q", task="domain"), user("r"), said("a", "t"), user("s", task="read_url"), result("x", "1")],
    "open": [user("q"), said("a", "t", wo_eos=True)],
    "nothing": [],
}


def committed(encode):
    modes = [{"thinking": False}, {"thinking": True}]
    for name, messages in CASES.items():
        variants = list(modes)
        if name in ("one", "systems", "called", "answered", "nothing"):
            variants += [{**m, "tools": TOOLS} for m in modes]
        if name == "one":
            variants += [{}, {"enable_thinking": True}, {"enable_thinking": True, "thinking": False}]
            variants += [{"thinking": t, "reasoning_effort": e, **g} for t in (True, False) for e in ("low", "high", "max")
                         for g in ({}, {"graded_efforts": True})]
        if name in ("turns", "answered"):
            variants += [{"thinking": True, "drop_thinking": False}, {"thinking": False, "drop_thinking": False}]
        if name in ("one", "system"):
            variants += [{**m, "response_format": FORMAT} for m in modes]
        for kwargs in variants:
            for generate in (True, False):
                if not generate and name not in ("one", "turns", "last", "called"):
                    continue
                case = {"messages": messages, "add_generation_prompt": generate, "kwargs": kwargs, "bos_token": None,
                        "eos_token": None}
                given = [k if k in ("tools", "response_format") else f"{k}_{v}" for k, v in kwargs.items()]
                ident = "/".join([name] + given + ["nogen"] * (not generate))
                yield {"id": ident, "template": "../../../" + TEMPLATE, **case, "expected": expected(encode, case)}


# ---- tokenizers ----


def renumbered(data, tokens, merges, added):
    """tokenizer.json with these tokens and, behind them, these added ones."""
    model = {**data["model"], "vocab": {t: i for i, t in enumerate(tokens)}, "merges": [" ".join(m) for m in merges]}
    return {**data, "model": model, "added_tokens": [{**t, "id": len(tokens) + i} for i, t in enumerate(added)]}


def encoder_of(data):
    import tokenizers
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(data))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def part_of(data, texts):
    """The part of tokenizer.json that texts need, the ids of its tokens there, and the ids of the texts there. BPE never
    takes a merge back: without those that no text makes, the same merges are made in the same order."""
    ids = list(map(encoder_of(data), texts))
    vocab, merges = data["model"]["vocab"], [m.split(" ") if isinstance(m, str) else m for m in data["model"]["merges"]]
    made = {a + b: (a, b) for a, b in reversed(merges)}
    added = [t for t in data["added_tokens"] if "place▁holder" not in t["content"]]
    names = {i: t for t, i in vocab.items()}
    need = [names[i] for i in {i for text in ids for i in text} if i in names and i not in {t["id"] for t in added}]
    keep = {t for t in vocab if len(t) == 1}
    while need:
        t = need.pop()
        if t not in keep:
            keep.add(t)
            need += made[t]
    tokens = sorted(keep, key=vocab.get)
    real = [vocab[t] for t in tokens] + [t["id"] for t in added]
    small = renumbered(data, tokens, [m for m in merges if {*m, "".join(m)} <= keep], added)
    assert [[real[i] for i in text] for text in map(encoder_of(small), texts)] == ids
    return small, real, ids


def names_in(added):
    return re.compile("|".join(re.escape(t["content"]) for t in sorted(added, key=lambda t: -len(t["content"]))))


def trained(data, texts):
    """tokenizer.json with merges that texts, cut at special tokens, give behind its pre-tokenizer."""
    import tokenizers
    added = [t for t in data["added_tokens"] if not re.search("place[▁_]holder", t["content"])]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(renumbered(data, [], [], [])))
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=TOKENS - len(added), show_progress=False,
                                             initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator((part for text in texts for part in names_in(added).split(text)), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return renumbered(data, sorted(model["vocab"], key=model["vocab"].get), model["merges"], added)


def ids_of(data, encode, case):
    """The ids of a case. Names of special tokens in the conversation are text, which the library does not know."""
    names, whole, text = names_in(data["added_tokens"]), encoder_of(data), case["expected"]
    plain, ids, at = encoder_of({**data, "added_tokens": []}), [], 0

    def hidden(v):
        if isinstance(v, dict):
            return {k: hidden(x) for k, x in v.items()}
        if isinstance(v, list):
            return [hidden(x) for x in v]
        return names.sub(lambda m: "\ue000" * len(m[0]), v) if isinstance(v, str) else v

    seen = expected(encode, hidden(case))
    assert len(seen) == len(text)
    for m in names.finditer(seen):
        ids += plain(text[at:m.start()]) + whole(m[0])
        at = m.end()
    ids += plain(text[at:])
    assert seen != text or ids == whole(text)
    return ids


# ---- what is written ----


def read(*path):
    with open(os.path.join(*path), encoding="utf8", newline="") as f:
        return f.read()


def dump(tokenizer, ids, directory):
    with open(os.path.join(directory, "tokenizer.json"), "w", encoding="utf8") as f:
        f.write(json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":")) + "\n")
    with open(os.path.join(directory, "ids.json"), "w", encoding="utf8") as f:
        f.write(ids + "\n")


def write(release, encode):
    rows = list(committed(encode))
    assert len({r["id"] for r in rows}) == len(rows)
    with open(os.path.join(DIR, "cases.jsonl"), "w", encoding="utf8") as f:
        f.writelines(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)
    # English, and texts in many scripts: few enough that there are words of one token and of several
    texts = [read("prompts/haystack.txt")] + [gen_tokens.text(gen_tokens.TRAINING + i, repeat=False) for i in range(2000)]
    tokenizer = trained(json.loads(read(release, "tokenizer.json")), [r["expected"] for r in rows] + texts)
    # every conversation with thinking; the text about tools is long
    ids = {r["id"]: ids_of(tokenizer, encode, r) for r in rows if r["kwargs"].get("thinking") and
           r["add_generation_prompt"] and ("tools" not in r["kwargs"] or r["id"].startswith("answered/"))}
    dump(tokenizer, "{\n" + ",\n".join(f'"{k}": {json.dumps(v)}' for k, v in ids.items()) + "\n}", DIR)
    print(f"{len(rows)} cases, {len(ids)} of them with {sum(map(len, ids.values()))} ids in {DIR}")


def write_golden(release, directory):
    source = os.path.join(release, "encoding", "tests")
    os.makedirs(directory, exist_ok=True)
    for i in range(1, 5):
        for name in (f"test_input_{i}.json", f"test_output_{i}.txt"):
            shutil.copyfile(os.path.join(source, name), os.path.join(directory, name))
    texts = [read(source, f"test_output_{i}.txt") for i in range(1, 5)]
    tokenizer, real, ids = part_of(json.loads(read(release, "tokenizer.json")), texts)
    dump(tokenizer, json.dumps({"tokens": real, "prompts": ids}), directory)
    print(f"{len(real)} tokens, {[len(i) for i in ids]} ids in {directory}")


def committed_v41(encode):
    """Only what differs of DeepSeek-V4.1."""
    for name, messages in CASES.items():
        variants = [{"thinking": True}]
        if name in ("one", "system", "systems", "answered", "nothing"):
            variants += [{}, {"thinking": False}, {"tools": TOOLS}]
        if name == "one":
            variants += [{"reasoning_effort": e} for e in ("low", "max", 7)] + [{"thinking": False, "tools": TOOLS}]
        for kwargs in variants:
            case = {"messages": messages, "add_generation_prompt": True, "kwargs": {"v41": True, **kwargs},
                    "bos_token": None, "eos_token": None}
            ident = "/".join([name] + [k if k == "tools" else f"{k}_{v}" for k, v in kwargs.items()])
            yield {"id": ident, "template": "../../../" + TEMPLATE, **case, "expected": expected(encode, case)}


# ---- random conversations ----


def random_message(r, calls):
    text = r.choice(["", "a", "b c\n", "\n\nd", "é｜DSML｜", "<think>x</think>y", "{{ z }}"])
    kind = r.choices(["user", "assistant", "tool", "system", "developer", "latest_reminder"], [8, 8, 6, 1, 1, 1])[0]
    m = {"role": kind, "content": text}
    if kind == "tool":
        m["tool_call_id"] = r.choice((calls or []) + ["?", ""])
        if r.random() < 0.1:
            del m["tool_call_id"]
    if kind == "assistant":
        if r.random() < 0.7:
            m["reasoning_content"] = r.choice(["", "t", "\nu\n", None])
        if r.random() < 0.4:
            calls[:] = [r.choice(["x", "y", "z", "w", ""]) for _ in range(r.randint(1, 4))]
            m["tool_calls"] = [call(i, r.choice("fg"), r.choice(['{"s": "v"}', "{}", '{"n": [1, {"k": null}], "t": "<b>"}',
                                                                 "text", ""])) for i in calls]
            if r.random() < 0.2:
                m["content"] = None
            if r.random() < 0.2:
                for c in m["tool_calls"]:
                    c["function"]["id"] = c.pop("id")
    if kind == "developer":
        m["content"] = text or "d"
        if r.random() < 0.3:
            m["tools"] = TOOLS
    if kind in ("system", "developer") and r.random() < 0.2:
        m["response_format"] = FORMAT
    if kind in ("user", "assistant", "developer", "system", "latest_reminder") and r.random() < 0.06:
        m["task"] = r.choice(["action", "query", "authority", "domain", "title", "read_url"])
    return m


def random_case(r, v41):
    calls, kwargs = [], {"thinking": r.random() < 0.6}
    messages = [random_message(r, calls) for _ in range(r.randint(1, 9))]
    if r.random() < 0.4:
        messages.insert(0, system(r.choice(["s", "", "s\n"])))
    if r.random() < 0.25:
        kwargs["tools"] = TOOLS
    if r.random() < 0.1:
        kwargs["response_format"] = FORMAT
    if r.random() < 0.2:
        kwargs["drop_thinking"] = r.random() < 0.5
    if r.random() < 0.2:
        kwargs["reasoning_effort"] = r.choice(["high", "max"])
    if r.random() < 0.2:
        kwargs["graded_efforts"] = True
    if v41:
        kwargs.pop("graded_efforts", None)
        kwargs["v41"] = True
        if r.random() < 0.3:
            kwargs["reasoning_effort"] = r.choice(["low", "xhigh", 1, 42, 100])
        for _ in range(r.choice([0, 0, 1, 2])):
            messages.insert(r.randint(0, len(messages)), system(r.choice(["", "m\n"])))
    return {"messages": messages, "add_generation_prompt": True, "kwargs": kwargs}


def compare(encode, n, path, v41=False):
    env = gen_templates.environment()
    env.filters["from_json"] = json.loads
    with open(path, encoding="utf8") as f:
        template = env.from_string(f.read())
    r, bad = random.Random(4), 0
    for _ in range(n):
        case = random_case(r, v41)
        want = expected(encode, case)
        given = {"tools": None, **case["kwargs"], **{k: v for k, v in case.items() if k != "kwargs"}}
        run = subprocess.run(["./moe", "--render", "--chat-template-file", path], input=json.dumps(given).encode(),
                             capture_output=True, check=False)
        for name, got in ("jinja2", template.render(**given)), ("moe", run.stdout.decode() + run.stderr.decode()):
            if got != want:
                bad += 1
                print(f"{name}: {json.dumps(case, ensure_ascii=False)}\n  {got[-300:]!r}\n  {want[-300:]!r}")
    print(f"{n} conversations, {bad} differences")
    return 1 if bad else 0


if __name__ == "__main__":
    if sys.argv[2:3] == ["--v41"]:
        sys.path.insert(0, sys.argv[1])
        from deepseek_v41_encoding import encode_messages
        if sys.argv[3:]:
            sys.exit(compare(encode_messages, int(sys.argv[3]), TEMPLATE, True))
        os.makedirs(DIR + "1", exist_ok=True)
        with open(DIR + "1/cases.jsonl", "w", encoding="utf8") as f:
            f.writelines(json.dumps(c, ensure_ascii=False) + "\n" for c in committed_v41(encode_messages))
        sys.exit()
    sys.path.insert(0, os.path.join(sys.argv[1], "encoding"))
    from encoding_dsv4 import encode_messages
    if sys.argv[2:3] == ["--compare"]:
        sys.exit(compare(encode_messages, int(sys.argv[3]), (sys.argv[4:] or [TEMPLATE])[0]))
    if sys.argv[2:3] == ["--golden"]:
        write_golden(sys.argv[1], sys.argv[3])
    else:
        write(sys.argv[1], encode_messages)
