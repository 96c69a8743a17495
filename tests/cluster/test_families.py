"""Checkpoints of other families of the same code, through a whole cluster: config.json, tokenizer,
template and form of calls as these ship them. Prompts and tokens are judged by transformers, and by
tiktoken where the family's own tokenizer is one."""

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import DeepseekV3ForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.utils.chat_template_utils import render_jinja_template

from tests.cluster.harness import Cluster
from tests.model.public_models import make_public_model
from tests.model.reference import reference_greedy

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

QUESTION = {"role": "user", "content": "Wie wird das Wetter\n in Zürich?"}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Zürich", 'a "{x}"']},
        "note": {"type": "string", "maxLength": 6},
    },
    "required": ["city", "note"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
NUM_TOKENS = 24


class Family(NamedTuple):
    """`prompt` makes ids of messages; `call` finds a call's id and arguments in what is written."""

    folder: Path
    reference: DeepseekV3ForCausalLM
    prompt: Callable[[list[Any]], list[int]]
    decode: Callable[[list[int]], str]
    call: re.Pattern[str]


def with_arguments(messages: list[Any]) -> list[Any]:
    """As transformers wants them."""
    told = json.loads(json.dumps(messages))
    for call in (call for message in told for call in message.get("tool_calls", ())):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return told


GIGACHAT3_TEMPLATE = """\
{%- macro turn(role, content) -%}
  {{- role + '<|role_sep|>\\n' + content + '<|message_sep|>\\n\\n' -}}
{%- endmacro -%}
{{- bos_token -}}
{%- if tools %}{{ turn('function descriptions', tools | tojson(ensure_ascii=False)) }}{% endif -%}
{%- for message in messages -%}
  {{- turn('function result' if message.role == 'tool' else message.role, message.content or '') -}}
  {%- if message.tool_calls -%}
    {%- set call = message.tool_calls[0].function -%}
    {%- set arguments = call.arguments | tojson(ensure_ascii=False) -%}
    {{- turn('function call', '{"name": "' + call.name + '", "arguments": ' + arguments + '}') -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ 'assistant<|role_sep|>\\n' }}{% endif -%}
"""


def gigachat3(folder: Path) -> Family:
    special = ["<unk>", "<s>", "</s>", "<|role_sep|>", "<|message_sep|>"]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), "er"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    reference = make_public_model(
        folder, "GigaChat3", vocab_size=len(tokens), bos_token_id=1, eos_token_id=2
    )
    (folder / "generation_config.json").unlink()
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("e", "r")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": GIGACHAT3_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields | names))
    judge = PreTrainedTokenizerFast.from_pretrained(folder)

    def prompt(messages: list[Any]) -> list[int]:
        ids: list[int] = judge.apply_chat_template(
            with_arguments(messages), tools=[TOOL], add_generation_prompt=True, return_dict=False
        )
        return ids

    call = re.compile(
        r"<\|message_sep\|>\n\nfunction call<\|role_sep\|>\n"
        r'\{"name": "weather", "arguments": (?P<arguments>\{.*\})\}(</s>)?'
    )
    return Family(folder, reference, prompt, judge.decode, call)


KIMI_TEMPLATE = """\
{%- if tools -%}
  <|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
  {%- set who = message.role if message.role in ('user', 'assistant') else 'system' -%}
  <|im_{{ who }}|>{{ message.name or message.role }}<|im_middle|>
  {%- if message.role == 'tool' %}## Return of {{ message.tool_call_id }}\\n{% endif -%}
  {{- message.content or '' -}}
  {%- if message.tool_calls -%}
    <|tool_calls_section_begin|>
    {%- for call in message.tool_calls -%}
      {%- set arguments = call.function.arguments -%}
      <|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
      {{- arguments if arguments is string else arguments | tojson }}<|tool_call_end|>
    {%- endfor -%}
    <|tool_calls_section_end|>
  {%- endif -%}
  <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif -%}
"""
KIMI_PATTERN = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}&&[^\p{Han}]]+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI_SPECIAL = [
    "[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>",
    "<|im_middle|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
    "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "[UNK]", "[PAD]",
]  # fmt: skip


def kimi_k2(folder: Path) -> Family:
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"er": 256, b"functions": 257}
    special = {token: len(ranks) + index for index, token in enumerate(KIMI_SPECIAL)}
    judge = tiktoken.Encoding(
        "kimi", pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens=special
    )
    reference = make_public_model(
        folder,
        "Kimi-K2-Instruct",
        vocab_size=judge.n_vocab + 2,  # padded
        bos_token_id=special["[BOS]"],
        eos_token_id=special["[EOS]"],
        auto_map={"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
        aux_loss_alpha=0.001,
        seq_aux=True,
    )
    generation = {"eos_token_id": special["<|im_end|>"]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    # As docs/install.md says.
    converter = TikTokenConverter(
        str(folder / "tiktoken.model"), KIMI_PATTERN, extra_special_tokens=KIMI_SPECIAL
    )
    converter.converted().save(str(folder / "tokenizer.json"))
    fields = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": {
            str(token_id): {"content": token, "special": not token.startswith("<|tool")}
            for token, token_id in special.items()
        },
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "model_max_length": 10**30,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    (folder / "chat_template.jinja").write_text(KIMI_TEMPLATE)

    def prompt(messages: list[Any]) -> list[int]:
        (text,), _ = render_jinja_template(
            [with_arguments(messages)],
            chat_template=KIMI_TEMPLATE,
            tools=[TOOL],
            add_generation_prompt=True,
        )
        return judge.encode(text, allowed_special="all")

    call = re.compile(
        r"<\|tool_calls_section_begin\|><\|tool_call_begin\|>(?P<id>functions\.weather:\d+)"
        r"<\|tool_call_argument_begin\|>(?P<arguments>\{.*\})<\|tool_call_end\|>"
        r"<\|tool_calls_section_end\|>(<\|im_end\|>)?"
    )
    return Family(folder, reference, prompt, judge.decode, call)


@pytest.mark.parametrize("make", [gigachat3, kimi_k2])
def test_a_family(make: Callable[[Path], Family], tmp_path: Path) -> None:
    """It answers as transformers does, and its calls come and go in OpenAI's form."""
    family = make(tmp_path / "model")

    def chat(messages: list[Any], **fields: Any) -> tuple[dict[str, Any], list[int]]:
        """The choice, and the tokens behind the prompt, which must be the family's own."""
        asked = {"messages": messages, "tools": [TOOL], "return_token_ids": True, "temperature": 0}
        body = {"model": cluster.model, "max_tokens": NUM_TOKENS} | asked | fields
        reply = cluster.client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        prompt = family.prompt(messages)
        assert reply.json()["prompt_token_ids"] == prompt
        (choice,) = reply.json()["choices"]
        return choice, choice["token_ids"]

    def check_answer(messages: list[Any]) -> None:
        _, ids = chat(messages, ignore_eos=True)
        assert ids == reference_greedy(family.reference, family.prompt(messages), NUM_TOKENS)

    options = ("--decode-ranks", "1", "--speculative-tokens", "1" if make is gigachat3 else "0")
    with Cluster(tmp_path / "logs", *options, model=family.folder) as cluster:
        check_answer([QUESTION])
        forced: Any = {
            "max_tokens": 400, "tool_choice": "required", "parallel_tool_calls": False,
        }  # fmt: skip
        choice, ids = chat([QUESTION], **forced)
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        (call,) = message["tool_calls"]
        written = family.call.fullmatch(family.decode(ids))
        assert written
        assert call["function"] == {"name": "weather", "arguments": written["arguments"]}
        assert call["id"] == written.groupdict().get("id", call["id"])
        Draft202012Validator(PARAMETERS).validate(json.loads(written["arguments"]))
        with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
            streamed = client.chat.completions.stream(
                model=cluster.model, messages=[QUESTION], tools=[TOOL], temperature=0, **forced
            )
            with streamed as stream:
                told = stream.get_final_completion().choices[0].message
        assert told.tool_calls
        assert told.tool_calls[0].function.arguments == written["arguments"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "18 °C"}
        check_answer([QUESTION, message, result])
