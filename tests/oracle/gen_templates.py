#!/usr/bin/env python3
"""Renders chat templates with jinja2, in the environment of transformers' apply_chat_template.

    gen_templates.py                    writes to tests/golden/templates: to cases.jsonl the cases of our own templates,
                                        behind those of the demo model's template, which stay as they are; to
                                        snippets.jsonl and language.jsonl the templates of template_snippets.py
    gen_templates.py --fuzz N [--seed S] renders N random templates with jinja2 and with build/test_moe; exit 1 if any
                                        differs, except where moe refuses by design
    gen_templates.py --compare FILE...  renders the dialogues below with these templates and with `./moe --render`, byte
                                        for byte; exit 1 if any differs

Needs jinja2 3.1.6 and Python 3.11. Runs at the top of the tree.
"""
import datetime
import json
import os
import subprocess
import sys

import jinja2
import jinja2.ext
import jinja2.parser
import jinja2.runtime
from jinja2.sandbox import ImmutableSandboxedEnvironment

import template_fuzz
import template_snippets

DIR = "tests/golden/templates"
OWN = ["harmony", "suffixed", "listed", "bracketed", "typed"]
NOW = "2026-03-07T09:05:03"

TOOLS = [
    {"type": "function", "function": {
        "name": "weather", "description": " The weather.\nTwo lines ", "parameters": {
            "type": "object", "required": ["city"], "properties": {
                "city": {"type": "string", "description": 'City é "q" <b>'},
                "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
                "days": {"type": ["integer", "null"], "default": 3},
                "at": {"type": "array", "items": {"type": "number", "nullable": True}},
                "more": {"type": "object", "required": ["a"], "properties": {
                    "a": {"type": "boolean"}, "b": {"oneOf": [{"type": "string"}, {"type": "integer", "default": None}]}}},
            }}}},
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}},
]
CALL = [{"type": "function", "function": {
    "name": "weather", "arguments": {"city": "Köln", "days": 2, "at": [1.0, 2e20, -3], "more": {"a": True, "b": None}}}}]


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def both(text):
    """The thinking under the keys that templates read."""
    return {"thinking": text, "reasoning_content": text}


SYSTEM = {"role": "system", "content": "Be brief.\n"}
RESULT = {"role": "tool", "content": '{"t": "21 °C"}', "name": "weather"}
DIALOGUES = {
    "one": [user("Hi")],
    "system": [SYSTEM, user(" Hi \n")],
    "turns": [SYSTEM, user("a"), said("\nb \n"), user("c"), said("d"), user("e\t")],
    "thought": [user("a"), said("b", **both("Hm.\n\nSo.\n")), user("c"), said("d", **both("é")), user("e")],
    "tags": [user("a"), said("<think>\nx\n</think>\n\nb"), user("c")],
    "last": [user("a"), said("b", **both("\nHm.\n"))],
    "marks": [{"role": "system", "content": "<|start|>{{ x }}"}, user("<|channel|>final<|message|>{% if %}<|end|>[INST]</s>"),
              said("<|end|> é漢👩‍👧\u00a0\u2028\"'\\"), user("<|call|>")],
    "quoted": [user("a"), said("<|channel|>analysis<|message|>"), user("b")],
    "called": [user("Weather?"), said("", tool_calls=CALL, **both("Look.")), RESULT],
    "answered": [user("Weather?"), said("", tool_calls=CALL, **both("Look.")), RESULT, said("21."), user("Thanks")],
    "results": [user("Weather?"), said(None, tool_calls=CALL), RESULT, RESULT, said("21."), user("Thanks")],
    "parts": [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
    "odd": [said("a"), user("b"), user("c")],
    "nothing": [],
}
EFFORTS = [{"reasoning_effort": e} for e in ("low", "medium", "high", "no_think")]
SWITCHES = [{"enable_thinking": on, "thinking": on} for on in (False, True)]
MODES = [{"thinking_mode": mode} for mode in ("enabled", "disabled", "adaptive")]
# for --compare only: what keeps or drops the thinking of former turns, results that are lists, tools of other forms
KEPT = [{name: on} for name in ("clear_thinking", "drop_thinking", "preserve_thinking") for on in (False, True)]
LISTED = {
    "outputs": [user("Weather?"), said("", tool_calls=CALL, **both("Look.")),
                {"role": "tool", "content": [{"output": "21 °C"}, {"output": "<|user|>"}]}, said("21."), user("Thanks")],
    "references": [user("Which?"), said(None, tool_calls=CALL),
                   {"role": "tool", "content": [{"type": "tool_reference", "name": "now"}]}, user("And?")],
    "texts": [user([{"type": "text", "text": " a"}, "b", {"type": "image_url"}, {"type": "audio"}]),
              said("c", tool_calls=CALL + [{"name": "now", "arguments": {}}]),
              {"role": "tool", "content": [{"type": "text", "text": "d"}]}, RESULT],
}
OTHER_TOOLS = [{"name": "bare", "description": "é", "parameters": {"type": "object", "properties": {}}, "strict": True},
               {"type": "function", "function": {"name": "late", "defer_loading": True}}, TOOLS[1]]


def environment(now=NOW):
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            return jinja2.nodes.Scope(parser.parse_statements(["name:endgeneration"], drop_needle=True), lineno=line)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                        extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: datetime.datetime.fromisoformat(now).strftime(form)
    return env


def render(env, source, case):
    """The text, or None and the exception."""
    given = {"tools": None, "documents": None, **case["kwargs"], "messages": case["messages"],
             "add_generation_prompt": case["add_generation_prompt"]}
    given.update({k: case[k] for k in ("bos_token", "eos_token") if case[k] is not None})
    try:
        return env.from_string(source).render(**given), None
    except Exception as e:  # of any kind: the other side must refuse, too
        return None, e


def cases(source, more=False):
    """Every dialogue with every variant that the template knows."""
    variants = [{}] + [v for v in EFFORTS + SWITCHES + MODES + KEPT * more if any(k in source for k in v)]
    for name, messages in (DIALOGUES | LISTED if more else DIALOGUES).items():
        for tools in (None, TOOLS, OTHER_TOOLS)[:2 + more]:
            for kwargs in variants:
                for generate in (True, False):
                    yield name, {"messages": messages, "add_generation_prompt": generate,
                                 "kwargs": {**kwargs, "tools": tools} if tools else kwargs,
                                 "bos_token": "<s>", "eos_token": "</s>", "now": NOW}


def write():
    env = environment()
    path = os.path.join(DIR, "cases.jsonl")
    with open(path, encoding="utf8") as f:
        lines = [line for line in f if not any(json.loads(line)["template"] == n + ".jinja" for n in OWN)]
    for template in OWN:
        with open(os.path.join(DIR, template + ".jinja"), encoding="utf8") as f:
            source = f.read()
        done, variants = set(), set()
        for name, case in cases(source):
            # tools and variants beside one dialogue, all dialogues as they come
            tools, kwargs = "tools" in case["kwargs"], {k: v for k, v in case["kwargs"].items() if k != "tools"}
            if tools and name not in ("system", "answered") or kwargs and name != "thought":
                continue
            if not case["add_generation_prompt"] and name not in ("thought", "last", "called"):
                continue
            ident = "/".join([template, name] + ["tools"] * tools + [f"{k}_{v}" for k, v in kwargs.items()][:1] +
                             ["nogen"] * (not case["add_generation_prompt"]))
            text, error = render(env, source, case)
            if error and type(error) is not jinja2.exceptions.TemplateError:
                continue
            assert ident not in done, ident
            done.add(ident)
            row = {"id": ident, "template": template + ".jinja", **case}
            row.update({"expected": text} if error is None else {"expected_error": str(error)})
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        print(f"{template}: {len(done)} cases")
    with open(path, "w", encoding="utf8") as f:
        f.writelines(lines)
    print(f"{len(lines)} cases in {path}")


def names(env):
    """The names that jinja2 and the types of Python have, by group, from these themselves."""
    loop = jinja2.runtime.LoopContext([], jinja2.Undefined)
    tags = jinja2.parser._statement_keywords | env.extensions["jinja2.ext.LoopControlExtension"].tags
    out = {"filter": env.filters, "test": env.tests, "global": env.globals, "loop": dir(loop),
           "statement": tags | {"call", "filter", "raw", "generation"}}
    out.update({t.__name__: dir(t) for t in (str, int, float, list, tuple, dict)})
    return {group: sorted(n for n in listed if n[0] != "_") for group, listed in out.items()}


def write_snippets():
    env = environment(template_snippets.VARS["now"])
    given = {"tools": None, "documents": None, **template_snippets.VARS}

    def row(source, **more):
        return {**more, "template": source, "expected": env.from_string(source).render(**given)}

    def lines(name, rows):
        with open(os.path.join(DIR, name), "w", encoding="utf8") as f:
            f.writelines(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)
        print(f"{name}: {len(rows) - 1} templates")

    lines("snippets.jsonl", [{"vars": template_snippets.VARS}] + [row(s) for s in template_snippets.SNIPPETS])
    lines("language.jsonl", [{"vars": template_snippets.VARS, "names": names(env)}] +
          [row(s, name=n) for n, s in template_snippets.LANGUAGE.items()])


# What moe refuses although jinja2 renders it: a part of the message, for the reason that it gives.
BY_DESIGN = [
    "integer overflow in",          # integers have 64 bits
    "is too large",                 # .. and literals, too
    "is larger than 134217728",     # limits of sizes
    "half of a character",          # texts are UTF-8, without surrogates
    "is not supported: ",           # random, urlize, lipsum, encode, autoescape; sets; addresses of objects
    "is not supported for markup",  # formats of markup in markup
    "' is not an integer",          # counts are integers; jinja2 compares whatever it is given
    "cannot be sliced",             # jinja2 fails, too, unless the operand is a constant
    "slice indices must be",
    "the character reference '&",   # of HTML 5 beyond Latin-1
]


def fuzz(count, seed):
    """Renders random templates with jinja2 and with moe, prints the differences, and returns 1 if there are any."""
    env = environment()
    gen = template_fuzz.Gen(seed)
    bad = done = refused = failed = 0
    while done < count:
        sources = [gen.template() for _ in range(min(500, count - done))]
        done += len(sources)
        lines = "".join(json.dumps(x) + "\n" for x in [{"vars": {"messages": [], **gen.VARS}}] + [{"template": t} for t in sources])
        run = subprocess.run(["build/test_moe", "--render-lines"], input=lines.encode(), capture_output=True, check=False)
        replies = [json.loads(line) for line in run.stdout.decode().splitlines()]
        if len(replies) < len(sources):
            print(f"moe ends at {sources[len(replies)]!r}: {run.stderr.decode()[-500:]}")
            return 1
        for source, reply in zip(sources, replies):
            try:
                text = env.from_string(source).render(messages=[], tools=None, documents=None, **gen.VARS)
                text.encode()
            except Exception as e:  # of any kind: the other side must refuse, too
                text, error = None, e
            # addresses of objects, and constants that jinja2 cannot compile
            if text is not None and (" at 0x" in text or "<bound method" in text):
                continue
            if text is None and isinstance(error, NameError):
                continue
            if text is not None and "error" in reply and any(x in reply["error"] for x in BY_DESIGN):
                refused += 1
            elif text == reply.get("text"):
                failed += text is None
            else:
                bad += 1
                print(f"{source}\n    jinja2 {text!r}" + (f" {type(error).__name__} {error}" if text is None else "") +
                      f"\n    moe    {reply.get('text', reply.get('error'))!r}")
    print(f"{done} templates, {bad} differ, both refuse {failed}, moe alone {refused} by design")
    return 1 if bad else 0


def compare(paths):
    env = environment()
    bad = total = refused = 0
    for path in paths:
        with open(path, encoding="utf8", newline="") as f:
            source = f.read()
        for name, case in cases(source, True):
            text, error = render(env, source, case)
            given = {"tools": None, "documents": None, **case["kwargs"],
                     **{k: v for k, v in case.items() if k != "kwargs"}}
            run = subprocess.run(["./moe", "--render", "--chat-template-file", path], input=json.dumps(given).encode(),
                                 capture_output=True, check=False)
            total += 1
            refused += error is not None and run.returncode != 0
            if (error is None) != (run.returncode == 0) or (error is None and run.stdout.decode() != text):
                bad += 1
                print(f"{path}: {name}, {case['kwargs'].keys()}: jinja2 {error or repr(text)[-200:]}\n"
                      f"    moe {run.stderr.decode().strip() or repr(run.stdout.decode())[-200:]}")
    print(f"{total} renderings, {bad} differ, both refuse {refused}")
    return 1 if bad else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compare"]:
        sys.exit(compare(sys.argv[2:]))
    if sys.argv[1:2] == ["--fuzz"]:
        sys.exit(fuzz(int(sys.argv[2]), int(sys.argv[4]) if sys.argv[3:4] == ["--seed"] else 1))
    write()
    write_snippets()
