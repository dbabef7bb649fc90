"""Chat templates of the three families that call tools, cut down to what matters, with tokenizers that have their
markers as those of the families do: Hermes' are ordinary tokens, Llama's and Mistral's are special ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_models import IM_END, IM_START, make_tokenizer
from tokenizers import AddedToken

HERMES = (
    "{%- if tools %}<|im_start|>system\n# Tools\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    "</tools>\n"
    "For each call return:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>"
    "<|im_end|>\n{% endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response>"
    "<|im_end|>\n"
    "{%- else %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}\n<tool_call>\n"
    "{\"name\": \"{{ call.function.name }}\", \"arguments\": {{ call.function.arguments | tojson }}}\n</tool_call>"
    "{%- endfor %}<|im_end|>\n{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # fmt: skip

LLAMA = (
    "{%- for message in messages %}<|im_start|>{{ 'ipython' if message.role == 'tool' else message.role }}\n"
    "{%- if tools and loop.last %}Respond in the format "
    '{"name": function name, "parameters": dictionary of argument name and its value}.\n'
    "{%- for tool in tools %}{{ tool | tojson(indent=4) }}\n{% endfor %}{% endif %}"
    "{%- if message.tool_calls %}"
    '{"name": "{{ message.tool_calls[0].function.name }}", '
    '"parameters": {{ message.tool_calls[0].function.arguments | tojson }}}'
    "{%- else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

MISTRAL = (
    "{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{%- if message.tool_call_id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    "[TOOL_RESULTS]{{ {'content': message.content, 'call_id': message.tool_call_id} | tojson }}[/TOOL_RESULTS]"
    "{%- elif message.tool_calls %}[TOOL_CALLS] [{% for call in message.tool_calls %}"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}{% endfor %}]"
    "{%- else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}"
    "{%- endfor %}"
)

FAMILIES: dict[str, tuple[str, tuple[str, ...], bool]] = {
    "hermes": (HERMES, ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"), False),
    "llama3_json": (LLAMA, ("<|python_tag|>",), True),
    "mistral": (MISTRAL, ("[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"), True),
}
"""Family -> (template, tokens added, whether they are special)."""


def tokenizer_of(family: str) -> Any:
    template, markers, special = FAMILIES[family]
    tokenizer = make_tokenizer()
    tokens = [AddedToken(marker, special=special, normalized=False) for marker in markers]
    tokenizer.add_tokens(tokens, special_tokens=special)
    tokenizer.chat_template = template
    return tokenizer


def save_tokenizer(family: str, folder: Path) -> Path:
    tokenizer_of(family).save_pretrained(folder)
    return folder


__all__ = ["FAMILIES", "IM_END", "IM_START", "save_tokenizer", "tokenizer_of"]
