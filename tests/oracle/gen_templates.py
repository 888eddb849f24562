#!/usr/bin/env python3
"""Renders chat templates with jinja2, in the environment of transformers' apply_chat_template.

    gen_templates.py                    writes the cases of our own templates to tests/golden/templates/cases.jsonl,
                                        behind those of the demo model's template, which stay as they are
    gen_templates.py --compare FILE...  renders the dialogues below with these templates and with `./moe --render`, byte
                                        for byte; exit 1 if any differs

Needs jinja2 3.1.6. Runs at the top of the tree.
"""
import datetime
import json
import os
import subprocess
import sys

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

DIR = "tests/golden/templates"
OWN = ["harmony", "suffixed", "listed", "bracketed"]
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


def environment():
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
    env.globals["strftime_now"] = lambda form: datetime.datetime.fromisoformat(NOW).strftime(form)
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
    write()
