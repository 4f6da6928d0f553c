import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tiny_tokenizers import CHATML, byte_level, write_folder
from transformers import AutoTokenizer

from kvine.errors import RequestError
from kvine.text.chat import ChatTemplate
from kvine.text.tokenizer import tokenizer_from_folder

CONFIG = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
HI = [{"role": "user", "content": "Hi <b>there</b> & 你好"}]
TALK = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "繁體中文 \"quoted\" 'x'\n"},
]

LLAMA_LIKE = """\
{{- bos_token }}
{%- if tools is not none and tools %}{{- 'never' }}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
GEMMA_LIKE = """\
{{ bos_token }}
{% if messages[0]['role'] == 'system' %}
    {% set first = messages[0]['content'] + '\\n\\n' %}
    {% set loop_messages = messages[1:] %}
{% else %}
    {% set first = "" %}
    {% set loop_messages = messages %}
{% endif %}
{% for message in loop_messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {% endif %}
    {% set role = "model" if message['role'] == 'assistant' else message['role'] %}
    {{ '<start_of_turn>' + role + '\\n' + (first if loop.first else "") }}
    {% if message['content'] is string %}{{ message['content'] | trim }}{% endif %}
    {{ '<end_of_turn>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""
EVERYTHING = """\
{% macro turn(role, text) -%}
<|{{ role }}|>{{ text }}{{ eos_token }}
{%- endmacro %}
{% set ns = namespace(count=0, last="") %}
{% for message in messages %}
    {% if message.role == "system" %}{% continue %}{% endif %}
    {% set ns.count = ns.count + 1 %}
    {% set ns.last = message.content.split("+")[-1].strip().rstrip("?") %}
    {{ turn(message.role, message["content"].replace("<", "[")) }}
    {% if loop.last %}
    {% generation %}done {{ ns.count }} {{ ns.last ~ "|" ~ loop.length }}{% endgeneration %}{% break %}
    {% endif %}
{% endfor %}
{{ messages | map(attribute="role") | join(", ") }}
{{ messages | selectattr("role", "equalto", "user") | list | length }}
{{ messages[0] | tojson }} {{ {"a": [1, 2.5, none, true], "é": "<&>'"} | tojson(indent=2) }}
{{ "%s-%d" % ("x", 3) }} {{ "{}:{:>4}".format("y", 7) }} {{ [1, 2] + [3] }} {{ "ab" * 3 }} {{ 2 ** 5 }}
{{ range(3) | list }}
{{ messages[::-1][0].content | upper }} {{ dict(a=1).items() | list }} {{ "x" in ["x"] }} {{ "a-b".split("-") | first }}
{{ "  pad" | indent(2) }}{{ missing is defined }}{{ missing }}{{ strftime_now("%Y") | length }}
"""


def template(source: str, **special: str) -> ChatTemplate:
    return ChatTemplate(source, special, origin="a test")


@pytest.fixture(scope="module")
def backend() -> tokenizers.Tokenizer:
    return byte_level()


@pytest.mark.parametrize(
    "source", [CHATML, LLAMA_LIKE, GEMMA_LIKE, EVERYTHING], ids=["chatml", "llama", "gemma", "all"]
)
@pytest.mark.parametrize("messages", [HI, TALK], ids=["one", "talk"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_e11_renders_as_transformers_does(
    backend: tokenizers.Tokenizer,
    tmp_path: Path,
    source: str,
    messages: list[dict[str, str]],
    add_generation_prompt: bool,
) -> None:
    folder = write_folder(tmp_path, backend, tokenizer_config=CONFIG | {"chat_template": source})
    oracle = AutoTokenizer.from_pretrained(folder)
    found = tokenizer_from_folder(folder).chat_template
    assert found is not None
    expected = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert found.render(messages, add_generation_prompt=add_generation_prompt) == expected


# --- E11: where the template is found ---

CONFIGURED = "{{ bos_token }}config"


@pytest.mark.parametrize(
    "token", ["<|endoftext|>", {"content": "<|endoftext|>", "lstrip": False, "__type": "AddedToken"}]
)
@pytest.mark.parametrize(
    ("files", "text", "origin"),
    [
        ({}, CONFIGURED, "tokenizer_config.json"),
        ({}, [{"name": "rag", "template": "-"}, {"name": "default", "template": CONFIGURED}], "tokenizer_config.json"),
        ({}, [{"name": "only", "template": CONFIGURED}], "tokenizer_config.json"),
        ({"chat_template.json": '{"chat_template": "{{ bos_token }}json"}'}, None, "chat_template.json"),
        ({"chat_template.jinja": "{{ bos_token }}jinja"}, "not this one", "chat_template.jinja"),
    ],
)  # fmt: skip
def test_e11_template_is_found(
    backend: tokenizers.Tokenizer, tmp_path: Path, token: object, files: dict[str, str], text: object, origin: str
) -> None:
    write_folder(tmp_path, backend, tokenizer_config={"bos_token": token, "chat_template": text})
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    found = tokenizer_from_folder(tmp_path).chat_template
    assert found is not None
    assert found.origin == origin
    assert found.render(HI) == "<|endoftext|>" + origin.split(".")[-1].replace("json", "json" if files else "config")


@pytest.mark.parametrize("text", [None, [], [{"name": "a", "template": "x"}, {"name": "b", "template": "y"}], 7])
def test_e11_no_template_is_none_and_completions_work(
    backend: tokenizers.Tokenizer, tmp_path: Path, text: object
) -> None:
    tokenizer = tokenizer_from_folder(write_folder(tmp_path, backend, tokenizer_config={"chat_template": text}))
    assert tokenizer.chat_template is None
    assert tokenizer.decode(tokenizer.encode("still here")) == "still here"


def test_e11_broken_template_fails_the_chat_alone(backend: tokenizers.Tokenizer, tmp_path: Path) -> None:
    tokenizer = tokenizer_from_folder(write_folder(tmp_path, backend, tokenizer_config={"chat_template": "{% if %}"}))
    assert tokenizer.encode("still here")
    assert tokenizer.chat_template is not None
    for _ in range(2):
        with pytest.raises(RequestError, match=r"tokenizer_config\.json"):
            tokenizer.chat_template.render(HI)


# --- E11: messages ---


def test_e11_text_parts_become_one_string() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template("{{ messages[0].content }}").render([{"role": "user", "content": parts}]) == "a\nb"


def test_e11_other_entries_reach_the_template() -> None:
    assert template("{{ messages[0].name }}").render([{"role": "user", "content": "", "name": "Ada"}]) == "Ada"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        {"role": "user", "content": "x"},
        ["hello"],
        [{"content": "x"}],
        [{"role": "", "content": "x"}],
        [{"role": 1, "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": b"x"}],
        [{"role": "user", "content": "x", "extra": object()}],
        [{"role": "user", "content": "x", "extra": [{"deep": Path("x")}]}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
    ],
)
def test_e11_other_messages_are_refused(messages: Any) -> None:
    with pytest.raises(RequestError, match=r"[Mm]essages"):
        template("x").render(messages)


def test_e11_what_the_template_raises_is_what_the_user_reads() -> None:
    twice = [HI[0], HI[0]]
    with pytest.raises(RequestError, match="roles must alternate"):
        template(GEMMA_LIKE, bos_token="").render(twice)


def test_e11_template_failing_on_a_type_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="TypeError"):
        template("{{ 'a' + 1 }}").render(HI)


# --- E11: sandbox ---

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ (messages | attr('__class__')).__base__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['datetime'] }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '%s'.__mod__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ (1).__class__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{% for x in [].__class__.__subclasses__() %}{{ x }}{% endfor %}",
    "{{ lipsum.__globals__ }}",
    "{{ namespace(__html__=strftime_now) | escape }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ dict.fromkeys }}",
    "{{ dict.mro() }}",
    "{{ joiner.__call__.__globals__ }}",
    "{{ loop.__class__ }}{% for x in messages %}{{ loop._iterator }}{% endfor %}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as x %}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_e11_sandbox_escape_is_refused(source: str) -> None:
    messages = [dict(message) for message in HI]
    try:
        rendered = template(source).render(messages)
    except RequestError:
        pass
    else:
        assert not any(word in rendered for word in ("class", "module", "object", "function", "root"))
    assert messages == HI


BIG = "{% set r = range(99999) %}"
ENDLESS = [
    BIG + "{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}",
    BIG + "{% for a in r %}{% for b in r %}x{% endfor %}{% endfor %}",
    BIG + "{% for a in r %}{% for b in r if b < 0 %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    BIG + "{% for a in r recursive %}{{ loop(r) }}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = '%s%s' % (ns.s, ns.s) %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}"
    "{% endfor %}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = (ns.s, ns.s) %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s] * 2 %}{% endfor %}{{ ns.s == ns.s }}",
    "{% set ns = namespace(s={}) %}{% for i in range(60) %}{% set ns.s = dict(a=ns.s, b=ns.s) %}{% endfor %}"
    "{{ ns.s | tojson }}",
    "{% set ns = namespace(a=(1,), b=(1,)) %}{% for i in range(60) %}{% set ns.a = (ns.a, ns.a) %}"
    "{% set ns.b = (ns.b, ns.b) %}{% endfor %}{{ ns.a == ns.b }}",
    "{% macro two(to) %}{% set to.s = varargs %}{% endmacro %}{% set a = namespace(s=1) %}{% set b = namespace(s=1) %}"
    "{% for i in range(60) %}{{ two(a, a.s, a.s) }}{{ two(b, b.s, b.s) }}{% endfor %}{{ a.s == b.s }}",
    "{{ cycler(1, 2).items }}",  # another way to a container that holds the same one twice
    "{{ 'a' * 10 ** 12 }}",
    "{{ 2 ** 100000 }}",
    "{% set ns = namespace(n=10) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n }}",
    "{{ 'x'.ljust(10 ** 11) }}",
    "{{ 'x' | center(10 ** 11) }}",
    "{{ 'x\ny' | indent(10 ** 11) }}",
    "{{ '%99999999999d' % 1 }}",
    "{{ '%*d' % (99999999999, 1) }}",
    "{{ '{:99999999999}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=99999999999) }}",
    "{% set a = 'a' * 99999 %}{{ a.replace('a', a) }}",
    "{% set a = 'a' * 99999 %}{{ a | replace('a', a) }}",
    "{% set a = 'a' * 99999 %}{{ a.join(r or range(99999) | map('string')) }}",
    "{% set a = 'a' * 99999 %}{{ range(99999) | join(a) }}",
    "{% set a = 'a' * 99999 %}{{ ([a] * 99999) | join }}",
    "{{ [] | slice(10 ** 11) | list }}",
    "{{ lipsum(n=10 ** 9) }}",
    "{{ messages | tojson(indent=10 ** 9) }}",
]  # fmt: skip


@pytest.mark.parametrize("source", ENDLESS)
def test_e11_endless_template_is_stopped(source: str) -> None:
    started = time.process_time()
    with pytest.raises(RequestError, match="chat template"):
        template(source).render(HI)
    assert time.process_time() - started < 10


def test_e11_a_template_that_was_stopped_works_for_the_next_request() -> None:
    source = (
        BIG + "{% if messages | length > 1 %}{% for a in r %}{% for b in r %}x{% endfor %}{% endfor %}{% endif %}ok"
    )
    chat = template(source)
    with pytest.raises(RequestError):
        chat.render(TALK)
    assert chat.render(HI) == "ok"


def test_a_long_conversation_is_well_within_the_bounds() -> None:
    long = [{"role": role, "content": "word " * 200} for _ in range(1000) for role in ("user", "assistant")]
    rendered = template(GEMMA_LIKE, bos_token="<bos>").render(long)
    assert len(rendered) > 2_000_000
    assert template(CHATML).render(long).count("<|im_end|>") == 2000


def test_one_template_serves_many_threads() -> None:
    chat = template(CHATML)
    expected = {n: chat.render([{"role": "user", "content": str(n)}]) for n in range(8)}
    answers: dict[int, set[str]] = {}

    def ask(n: int) -> None:
        answers[n] = {chat.render([{"role": "user", "content": str(n)}]) for _ in range(50)}

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {n: {text} for n, text in expected.items()}


def test_tojson_leaves_html_alone() -> None:
    assert json.loads(template("{{ messages[0].content | tojson }}").render(HI)) == HI[0]["content"]
    assert "<b>" in template("{{ messages[0].content | tojson }}").render(HI)
